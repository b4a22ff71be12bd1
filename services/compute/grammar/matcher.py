"""The state of one guided sequence: where in its grammar it is, and what else it must obey."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from llguidance import LLMatcher

from services.compute.grammar.frames import Place
from services.compute.grammar.rules import TokenRules
from services.compute.step import Int32Array

MAX_ERROR_CHARACTERS = 400
REPLAYED_TOKENS = 16
UNSATISFIABLE = "no text of this model's tokens can satisfy it"

_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_OUR_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: |(?=invalid regex))")


class GrammarError(Exception):
    """A grammar that cannot be used, or cannot be gone on with; the message is for its author."""


class TokenRefused(Exception):
    """A token that its mask should have forbidden, which is no fault of the grammar's author."""


class SequenceMatcher:
    """Makes the masks of one sequence, token by token."""

    __slots__ = ("_everything_W", "_grammar", "_outputs", "_place", "_rules", "_stop_ids")

    def __init__(self, place: Place, grammar: LLMatcher | None, everything_W: Int32Array) -> None:
        self._place = place
        self._outputs = array("i", place.output_ids)
        self._grammar = grammar
        self._everything_W = everything_W
        self._rules = TokenRules(place, everything_W)
        self._stop_ids = frozenset((*place.eos_ids, *place.stop_ids))

    @property
    def place(self) -> Place:
        """Whose it is, as it stands now: another matcher could go on from here."""
        return replace(self._place, output_ids=tuple(self._outputs))

    @property
    def index(self) -> int:
        """The output index that the next mask is for."""
        return len(self._outputs)

    def owns(self, slot: int, epoch: int) -> bool:
        """Whether it is of this owner of this slot."""
        return self._place.slot == slot and self._place.epoch == epoch

    def replay(self) -> Iterator[None]:
        """Bring the grammar to where the outputs produced before have led, in steps."""
        tokens, grammar = self._place.output_ids, self._grammar
        if grammar is None:
            return
        for start in range(0, len(tokens), REPLAYED_TOKENS):
            if not grammar.consume_tokens(list(tokens[start : start + REPLAYED_TOKENS])):
                raise _refusal(grammar)
            yield

    def consume(self, index: int, token: int) -> bool:
        """Take the token drawn as output `index`; False if no mask is needed after it."""
        outputs = self._outputs
        if index != len(outputs):
            raise TokenRefused(f"output {index} came where output {len(outputs)} was due")
        outputs.append(token)
        if token in self._stop_ids or len(outputs) >= self._place.max_tokens:
            return False
        if self._grammar is not None and not self._grammar.consume_token(token):
            raise _refusal(self._grammar)
        self._rules.follow((token,))
        return True

    def fill(self, mask_W: Int32Array) -> None:
        """Write the mask of the next token; GrammarError if there is none that it may be."""
        grammar = self._grammar
        accepting = True
        if grammar is None:
            np.copyto(mask_W, self._everything_W)
        else:
            grammar.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if grammar.is_error():
                raise GrammarError(error_of(grammar))
            accepting = grammar.is_accepting()
        self._rules.apply(mask_W, accepting, len(self._outputs))
        if not mask_W.any():
            raise GrammarError("no token of this model is allowed here")


def _refusal(grammar: LLMatcher) -> Exception:
    """Tell a token that does not fit from a grammar that costs too much to take it."""
    told = error_of(grammar)
    return TokenRefused(told) if "doesn't satisfy the grammar" in told else GrammarError(told)


def error_of(grammar: LLMatcher) -> str:
    """What llguidance says is wrong, without its own state, at no length, in an author's words.

    Most grammars are composed of what clients sent, so an excerpt shows lines that they never saw.
    """
    text: str = grammar.get_error().partition("\n<")[0]
    text = _OUR_PLACE.sub("", _EXCERPT.sub("", text)).strip()
    if len(text) > MAX_ERROR_CHARACTERS:
        text = text[:MAX_ERROR_CHARACTERS] + " …"
    if text == "NoExtensionBias":  # llguidance's name for a grammar that nothing goes on with
        return UNSATISFIABLE
    return text or "the grammar cannot be followed any further"
