"""The grammar backend, llguidance: compiled grammars, and a matcher for each sequence."""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.tokenizer_file import tokenizer_file
from services.compute.grammar.protocol import MOST_FORCED, GrammarSettings, StartSequence
from services.compute.step import Int32Array, mask_words

MAX_ERROR_CHARACTERS = 400
REPLAYED_TOKENS = 16
UNSATISFIABLE = "no text of this model's tokens can satisfy it"

_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_OUR_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: |(?=invalid regex))")


class GrammarError(Exception):
    """A grammar that cannot be used or followed any further; the message is for its author."""


class TokenRefused(Exception):
    """A token that its mask should have forbidden, which is no fault of the grammar's author."""


class GrammarBackend:
    """Compiles grammars for one tokenizer, keeps the last used, and copies them for each sequence.

    A kept grammar has made its first mask already, so that the lexers of copies know the vocabulary
    (1.3 ms the first time, 10 us afterwards, 128k tokens).
    """

    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        path = tokenizer_file(Path(settings.folder))
        self._tokenizer: LLTokenizer | None = None
        if path is not None:
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

    Most are llguidance's own. The worst grammar found (`s: s s | s s s | "a"`) takes 0.7 s for its
    last mask within 2,000 items in a row. A fifth of the default number of lexer states is allowed,
    1 to 2 kB each: 50 to 100 MB for one sequence.
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
    """Word llguidance's error for the grammar's author, short and without its internal state."""
    text: str = grammar.get_error().partition("\n<")[0]
    # Most grammars are composed from a request: an excerpt shows lines that its author never saw.
    text = _OUR_PLACE.sub("", _EXCERPT.sub("", text)).strip()
    if len(text) > MAX_ERROR_CHARACTERS:
        text = text[:MAX_ERROR_CHARACTERS] + " …"
    if text == "NoExtensionBias":  # llguidance's name for a grammar that nothing goes on with
        return UNSATISFIABLE
    return text or "the grammar cannot be followed any further"


def bits_of(ids: Iterable[int], vocab_size: int) -> Int32Array:
    """Return a mask [W] with the bits of these tokens; ids beyond the vocabulary are left out."""
    there = np.zeros(32 * mask_words(vocab_size), dtype=np.uint8)
    at = np.fromiter(ids, dtype=np.int64)
    there[at[(at >= 0) & (at < vocab_size)]] = 1
    return np.packbits(there, bitorder="little").view(np.int32)


def _words_of(ids: Iterable[int], everything_W: Int32Array) -> tuple[tuple[int, int], ...]:
    """Return the words of a mask where it has bits of these tokens; most have a few tokens only."""
    mask_W = bits_of(ids, 32 * len(everything_W)) & everything_W
    words = np.flatnonzero(mask_W)
    return tuple(zip(words.tolist(), mask_W[words].tolist(), strict=True))


class MaskRow:
    """The memory of a mask, as an array, by its words and by its address.

    A word of it is read in a third of the time that an array takes, and asking an array for its
    address takes longer than most masks' rules.
    """

    __slots__ = ("address", "array_W", "middle", "num_bytes", "words")

    def __init__(self, array_W: Int32Array) -> None:
        self.array_W = array_W
        self.words = array_W.data
        self.address: int = array_W.ctypes.data
        self.num_bytes = array_W.nbytes
        self.middle = len(array_W) // 2

    def allows_any(self) -> bool:
        # Within a text most words have bits; of bytes `any` stops at the first.
        return self.words[self.middle] != 0 or bool(self.array_W.view(np.bool_).any())

    def only_token(self) -> int:
        """The token that it allows if it is the only one; below 0 if there are others."""
        middle, words = self.middle, self.words
        if middle and words[middle] and words[middle - 1]:  # within a text
            return -1
        there = np.flatnonzero(self.array_W)
        if len(there) != 1:
            return -1
        bits = words[int(there[0])] & 0xFFFFFFFF
        return -1 if bits & (bits - 1) else 32 * int(there[0]) + bits.bit_length() - 1


class TokenRules:
    """The rules of one sequence that need no grammar: allowed ids, banned sequences, its ends."""

    __slots__ = (
        *("_banned_after", "_ends", "_eos", "_ignored", "_longest", "_may", "_min_tokens"),
        "_tail",
    )

    def __init__(self, start: StartSequence, everything_W: Int32Array) -> None:
        grammar_spec = start.grammar_spec
        allowed, banned = grammar_spec.allowed_token_ids, grammar_spec.banned_sequences
        vocab_size = 32 * len(everything_W)
        may = bits_of(allowed, vocab_size) & everything_W if allowed else everything_W
        single = bits_of((sequence[0] for sequence in banned if len(sequence) == 1), vocab_size)
        self._may: Int32Array | None = may & ~single if allowed or single.any() else None
        self._eos = _words_of(start.eos_ids, everything_W)
        self._ends = _words_of((*start.eos_ids, *start.stop_ids), everything_W)
        self._ignored = self._eos if start.ignore_eos else ()
        self._min_tokens = start.min_tokens
        # Of the longer ones, by the token before their last.
        self._banned_after: dict[int, list[tuple[int, ...]]] = {}
        for sequence in banned:
            if len(sequence) > 1 and 0 <= sequence[-1] < vocab_size:
                self._banned_after.setdefault(sequence[-2], []).append(sequence)
        self._longest = max((len(sequence) for sequence in banned), default=1) - 1
        self._tail: list[int] = []
        self.follow(start.output_ids)

    def follow(self, tokens: Iterable[int]) -> None:
        if self._banned_after:
            self._tail = [*self._tail, *tokens][-self._longest :]

    def apply(self, mask: MaskRow, accepting: bool, index: int) -> None:
        """Narrow a mask, and let the text end where the grammar accepts.

        A client's stop token may also come where the grammar takes it for text, which it then cuts.
        What `min_tokens` and `ignore_eos` hold back may come where nothing else may.
        """
        words = mask.words
        if self._may is not None:
            mask.array_W &= self._may
        if self._tail:
            self._ban(mask.array_W)
        if accepting:
            for word, bits in self._ends:
                words[word] |= bits
        else:
            for word, bits in self._eos:
                words[word] &= ~bits
        held_back = self._ends if index < self._min_tokens else self._ignored
        if held_back:
            before = [words[word] for word, _ in held_back]
            for word, bits in held_back:
                words[word] &= ~bits
            if not mask.allows_any():
                for (word, _), bits in zip(held_back, before, strict=True):
                    words[word] = bits

    def _ban(self, mask_W: Int32Array) -> None:
        tail = tuple(self._tail)
        for sequence in self._banned_after.get(tail[-1], ()):
            before = sequence[:-1]
            if tail[-len(before) :] == before:
                mask_W.view(np.uint32)[sequence[-1] // 32] &= ~np.uint32(1 << sequence[-1] % 32)


class SequenceMatcher:
    """Makes the masks of one sequence, token by token.

    Where there is one choice only it goes on by itself, ahead of what was drawn.
    """

    __slots__ = (
        *("_error", "_everything_W", "_grammar", "_num_drawn", "_outputs", "_start", "_rules"),
        *("_stop_ids", "epoch"),
    )

    def __init__(
        self, start: StartSequence, grammar: LLMatcher | None, everything_W: Int32Array
    ) -> None:
        self._start = start
        self.epoch = start.epoch
        self._outputs = array("i", start.output_ids)
        self._num_drawn = len(self._outputs)  # of them; those behind are the only ones
        self._error: Exception | None = None  # for which it cannot go on behind its last mask
        self._grammar = grammar
        self._everything_W = everything_W
        self._rules = TokenRules(start, everything_W)
        self._stop_ids = frozenset((*start.eos_ids, *start.stop_ids))

    @property
    def start(self) -> StartSequence:
        """The order with which another matcher would continue from here."""
        return replace(self._start, output_ids=tuple(self._outputs[: self._num_drawn]))

    @property
    def index(self) -> int:
        return len(self._outputs)

    def replay(self) -> Iterator[None]:
        """Advance the grammar by the outputs produced before, in steps."""
        tokens, grammar = self._start.output_ids, self._grammar
        if grammar is None:
            return
        for start in range(0, len(tokens), REPLAYED_TOKENS):
            if not grammar.consume_tokens(list(tokens[start : start + REPLAYED_TOKENS])):
                raise _refusal(grammar)
            yield

    def has_taken(self, index: int, token: int) -> bool:
        """Whether it has gone ahead by the token sampled as output `index`."""
        outputs = self._outputs
        if not index == self._num_drawn < len(outputs) or outputs[index] != token:
            return False
        self._num_drawn += 1
        return True

    def consume(self, index: int, token: int) -> bool:
        """Accept the token sampled as output `index`; False if no mask is needed after it."""
        if index != len(self._outputs):
            raise TokenRefused(f"output {index} came where output {len(self._outputs)} was due")
        self._num_drawn += 1
        return self._go_on(token)

    def _go_on(self, token: int) -> bool:
        outputs, grammar = self._outputs, self._grammar
        if self._error is not None:
            raise self._error
        outputs.append(token)
        if token in self._stop_ids or len(outputs) >= self._start.max_tokens:
            return False
        if grammar is not None and not grammar.consume_token(token):
            raise _refusal(grammar)
        self._rules.follow((token,))
        return True

    def fill_ahead(self, mask: MaskRow) -> tuple[int, ...]:
        """Write the mask of the first token that is not the only one; return those before it.

        At most MOST_FORCED, however long it takes: who starts at a later token has to come at
        least as far.
        """
        self.fill(mask)
        token = mask.only_token()
        if token < 0:
            return ()
        first = len(self._outputs)
        last = min(first + MOST_FORCED, self._start.max_tokens - 1)
        while token >= 0 and token not in self._stop_ids and len(self._outputs) < last:
            try:
                self._go_on(token)
                self.fill(mask)
            except Exception as error:  # for which the sequence fails when it comes to it
                self._error = error
                del self._outputs[-1]
                np.copyto(mask.array_W, bits_of((token,), 32 * len(mask.array_W)))
                break
            token = mask.only_token()
        return tuple(self._outputs[first:])

    def fill(self, mask: MaskRow) -> None:
        """Write the mask of the next token; GrammarError if no token is allowed."""
        grammar, accepting = self._grammar, True
        if grammar is None:
            np.copyto(mask.array_W, self._everything_W)
        else:
            grammar.unsafe_compute_mask_ptr(mask.address, mask.num_bytes)
            if grammar.is_error():
                raise GrammarError(error_of(grammar))
            accepting = grammar.is_accepting()
        self._rules.apply(mask, accepting, len(self._outputs))
        if not mask.allows_any():
            raise GrammarError("no token of this model is allowed here")


def _refusal(grammar: LLMatcher) -> Exception:
    """Tell a token that does not fit from a grammar that became too expensive."""
    message = error_of(grammar)
    refused = "doesn't satisfy the grammar" in message
    return TokenRefused(message) if refused else GrammarError(message)
