"""Rules for tokens that need no grammar: lists of allowed tokens and banned sequences."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.compute.grammar.frames import Place
from services.compute.grammar.masks import mask_words
from services.compute.step import Int32Array


def bits_of(ids: Iterable[int], vocab_size: int) -> Int32Array:
    """A mask [W] with the bits of these tokens; ids beyond the vocabulary are left out."""
    there = np.zeros(32 * mask_words(vocab_size), dtype=np.uint8)
    at = np.fromiter(ids, dtype=np.int64)
    there[at[(at >= 0) & (at < vocab_size)]] = 1
    return np.packbits(there, bitorder="little").view(np.int32)


class TokenRules:
    """What every mask of one sequence has in common, and which tokens its last ones forbid."""

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

    def __init__(self, place: Place, everything_W: Int32Array) -> None:
        guidance = place.guidance
        allowed, banned = guidance.allowed_token_ids, guidance.banned_sequences
        vocab_size = 32 * len(everything_W)
        may = bits_of(allowed, vocab_size) & everything_W if allowed else everything_W
        single = bits_of((sequence[0] for sequence in banned if len(sequence) == 1), vocab_size)
        self._may: Int32Array | None = may & ~single if allowed or single.any() else None
        self._eos = bits_of(place.eos_ids, vocab_size) & everything_W
        self._ends = self._eos | bits_of(place.stop_ids, vocab_size) & everything_W
        self._ignored = self._eos if place.ignore_eos else None
        self._min_tokens = place.min_tokens
        # Of the longer ones, by the token before their last.
        self._banned_after: dict[int, list[tuple[int, ...]]] = {}
        for sequence in banned:
            if len(sequence) > 1 and 0 <= sequence[-1] < vocab_size:
                self._banned_after.setdefault(sequence[-2], []).append(sequence)
        self._longest = max((len(sequence) for sequence in banned), default=1) - 1
        self._tail: list[int] = []
        self.follow(place.output_ids)

    def follow(self, tokens: Iterable[int]) -> None:
        """Take more of the sequence's tokens."""
        if self._banned_after:
            self._tail = [*self._tail, *tokens][-self._longest :]

    def apply(self, mask_W: Int32Array, accepting: bool, index: int) -> None:
        """Narrow a mask, and let the text end where the grammar accepts.

        A stop token of the client's may also come where it is text to the grammar, which it then
        cuts. What `min_tokens` and `ignore_eos` hold back comes where nothing else may.
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
