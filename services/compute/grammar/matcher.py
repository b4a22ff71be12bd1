"""The state of one structured sequence: where in its grammar it is, and its other token rules."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from llguidance import LLMatcher

from services.compute.grammar.backend import GrammarError, TokenRefused, error_of
from services.compute.grammar.masks import mask_words
from services.compute.grammar.messages import StartSequence
from services.compute.step import Int32Array

REPLAYED_TOKENS = 16


def bits_of(ids: Iterable[int], vocab_size: int) -> Int32Array:
    """Return a mask [W] with the bits of these tokens; ids beyond the vocabulary are left out."""
    there = np.zeros(32 * mask_words(vocab_size), dtype=np.uint8)
    at = np.fromiter(ids, dtype=np.int64)
    there[at[(at >= 0) & (at < vocab_size)]] = 1
    return np.packbits(there, bitorder="little").view(np.int32)


class TokenRules:
    """The rules of one sequence that need no grammar: allowed ids, banned sequences, its ends."""

    __slots__ = (
        "_banned_after",
        "_ends",
        "_eos",
        "_ignored",
        "_longest",
        "_may",
        "_min_tokens",
        "_tail",
    )

    def __init__(self, start: StartSequence, everything_W: Int32Array) -> None:
        grammar_spec = start.grammar_spec
        allowed, banned = grammar_spec.allowed_token_ids, grammar_spec.banned_sequences
        vocab_size = 32 * len(everything_W)
        may = bits_of(allowed, vocab_size) & everything_W if allowed else everything_W
        single = bits_of((sequence[0] for sequence in banned if len(sequence) == 1), vocab_size)
        self._may: Int32Array | None = may & ~single if allowed or single.any() else None
        self._eos = bits_of(start.eos_ids, vocab_size) & everything_W
        self._ends = self._eos | bits_of(start.stop_ids, vocab_size) & everything_W
        self._ignored = self._eos if start.ignore_eos else None
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

    def apply(self, mask_W: Int32Array, accepting: bool, index: int) -> None:
        """Narrow a mask, and let the text end where the grammar accepts.

        A client's stop token may also come where the grammar takes it for text, which it then cuts.
        Tokens that `min_tokens` and `ignore_eos` hold back come only where no other may.
        """
        if self._may is not None:
            mask_W &= self._may
        if self._tail:
            self._ban(mask_W)
        if accepting:
            mask_W |= self._ends
        else:
            mask_W &= ~self._eos
        held_back = self._ends if index < self._min_tokens else self._ignored
        if held_back is not None:
            others = mask_W & ~held_back
            if others.any():
                mask_W[:] = others

    def _ban(self, mask_W: Int32Array) -> None:
        tail = tuple(self._tail)
        for sequence in self._banned_after.get(tail[-1], ()):
            before = sequence[:-1]
            if tail[-len(before) :] == before:
                mask_W.view(np.uint32)[sequence[-1] // 32] &= ~np.uint32(1 << sequence[-1] % 32)


class SequenceMatcher:
    """Makes the masks of one sequence, token by token."""

    __slots__ = ("_everything_W", "_grammar", "_outputs", "_start", "_rules", "_stop_ids")

    def __init__(
        self, start: StartSequence, grammar: LLMatcher | None, everything_W: Int32Array
    ) -> None:
        self._start = start
        self._outputs = array("i", start.output_ids)
        self._grammar = grammar
        self._everything_W = everything_W
        self._rules = TokenRules(start, everything_W)
        self._stop_ids = frozenset((*start.eos_ids, *start.stop_ids))

    @property
    def start(self) -> StartSequence:
        """The order from which another matcher could go on from here."""
        return replace(self._start, output_ids=tuple(self._outputs))

    @property
    def index(self) -> int:
        """Output index of the next mask."""
        return len(self._outputs)

    def owns(self, slot: int, epoch: int) -> bool:
        """Whether it belongs to this owner of this slot."""
        return self._start.slot == slot and self._start.epoch == epoch

    def replay(self) -> Iterator[None]:
        """Advance the grammar by the outputs produced before, in steps."""
        tokens, grammar = self._start.output_ids, self._grammar
        if grammar is None:
            return
        for start in range(0, len(tokens), REPLAYED_TOKENS):
            if not grammar.consume_tokens(list(tokens[start : start + REPLAYED_TOKENS])):
                raise _refusal(grammar)
            yield

    def consume(self, index: int, token: int) -> bool:
        """Accept the token sampled as output `index`; False if no mask is needed after it."""
        outputs = self._outputs
        if index != len(outputs):
            raise TokenRefused(f"output {index} came where output {len(outputs)} was due")
        outputs.append(token)
        if token in self._stop_ids or len(outputs) >= self._start.max_tokens:
            return False
        if self._grammar is not None and not self._grammar.consume_token(token):
            raise _refusal(self._grammar)
        self._rules.follow((token,))
        return True

    def fill(self, mask_W: Int32Array) -> None:
        """Write the mask of the next token; GrammarError if no token is allowed."""
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
    """Tell a token that does not fit from a grammar that became too expensive."""
    message = error_of(grammar)
    return (
        TokenRefused(message) if "doesn't satisfy the grammar" in message else GrammarError(message)
    )
