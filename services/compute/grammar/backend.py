"""The grammar backend, llguidance: compiles grammars for one tokenizer and keeps the last used."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.compute.grammar.masks import mask_words
from services.compute.grammar.messages import GrammarSettings

MAX_ERROR_CHARACTERS = 400
UNSATISFIABLE = "no text of this model's tokens can satisfy it"

_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_OUR_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: |(?=invalid regex))")


class GrammarError(Exception):
    """A grammar that cannot be used or followed any further; the message is for its author."""


class TokenRefused(Exception):
    """A token that its mask should have forbidden, which is no fault of the grammar's author."""


class GrammarBackend:
    """Compiles grammars and copies them for each sequence.

    A kept grammar has made its first mask already, so that copies begin with a lexer that knows
    the vocabulary (1.3 ms the first time, 10 us afterwards, 128k tokens).
    """

    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        path = Path(settings.folder, "tokenizer.json")
        self._tokenizer: LLTokenizer | None = None
        if path.is_file():
            self._tokenizer = LLTokenizer(
                path.read_text(encoding="utf-8"),
                n_vocab=settings.vocab_size,
                eos_token=list(settings.eos_token_ids) or None,
            )
        self._limits = parser_limits()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def kept(self, grammar: str) -> LLMatcher | None:
        """Return a copy of this grammar if it is kept."""
        with self._lock:
            matcher = self._kept.get(grammar)
            if matcher is None:
                return None
            self._kept.move_to_end(grammar)
            return matcher.deep_copy()

    def compile(self, grammar: str) -> LLMatcher:
        """Return a copy of this grammar; GrammarError says why there is none. May take long."""
        kept = self.kept(grammar)
        if kept is not None:
            return kept
        if self._tokenizer is None:
            raise GrammarError("this model's folder has no tokenizer.json to apply a grammar with")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            mask_W = np.zeros(mask_words(self._settings.vocab_size), dtype=np.int32)
            matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if not matcher.is_error() and not mask_W.any() and not matcher.is_accepting():
                raise GrammarError(UNSATISFIABLE)
        if matcher.is_error():
            raise GrammarError(error_of(matcher))
        self._keep(grammar, matcher)
        return matcher.deep_copy()

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        settings = self._settings
        with self._lock:
            if grammar not in self._kept:
                self._kept_bytes += len(grammar)
            self._kept[grammar] = matcher
            while len(self._kept) > settings.cache_entries or self._kept_bytes > max(
                settings.cache_bytes, len(grammar)
            ):
                dropped, _ = self._kept.popitem(last=False)
                self._kept_bytes -= len(dropped)


def parser_limits() -> LLParserLimits:
    """Bound what one grammar and one mask may cost; beyond that only its request fails.

    Most are llguidance's own: an object of 500 optional properties comes to 2,007 items in a row,
    and the worst grammar found (`s: s s | s s s | "a"`) takes 0.7 s for its last mask within 2,000.
    A fifth of the default number of lexer states is allowed, 1 to 2 kB each: 50 to 100 MB for one
    sequence.
    """
    return LLParserLimits(
        max_items_in_row=2_000,
        step_max_items=50_000,
        step_lexer_fuel=200_000,
        initial_lexer_fuel=1_000_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,  # these would show its internal state
    )


def error_of(grammar: LLMatcher) -> str:
    """Word llguidance's error for the grammar's author, short and without its internal state.

    Most grammars are composed of what clients sent, so an excerpt shows lines that they never saw.
    """
    text: str = grammar.get_error().partition("\n<")[0]
    text = _OUR_PLACE.sub("", _EXCERPT.sub("", text)).strip()
    if len(text) > MAX_ERROR_CHARACTERS:
        text = text[:MAX_ERROR_CHARACTERS] + " …"
    if text == "NoExtensionBias":  # llguidance's name for a grammar that nothing goes on with
        return UNSATISFIABLE
    return text or "the grammar cannot be followed any further"
