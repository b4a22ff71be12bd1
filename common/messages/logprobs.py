"""Logprobs of tokens as columns: from the engine's step to the bytes of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from common.messages.arrays import (
    Float32s,
    Int32s,
    Uint8s,
    Uint32s,
    float32s,
    int32s,
    require,
    require_columns,
    uint8s,
    uint32s,
)

_ZERO = uint32s((0,))


class Candidate(NamedTuple):
    """One token that could have been chosen, with its logprob."""

    token_id: int
    text: str
    data: bytes
    logprob: float


class TokenLogprob(NamedTuple):
    """A token with its logprob, and the most likely candidates, best first.

    `rank` is its place among all tokens, 1 for the most likely; 0 where it is not known.
    """

    chosen: Candidate
    top: tuple[Candidate, ...]
    rank: int = 0


@dataclass(slots=True)
class Logprobs:
    """Logprobs of consecutive tokens, of the raw model distribution (as vLLM's).

    Token t has the next `num_candidates[t]` of `ids`, `values` and `sizes`: its own, then those of
    the most likely tokens, best first; or none at all. `ranks[t]` is its place among all tokens, 0
    where it is not known. Candidate c stands for the next `sizes[c]` bytes of `data`. Compute
    leaves these two columns empty; the detokenizer fills them.
    """

    num_candidates: Uint32s = field(default_factory=uint32s)
    ranks: Uint32s = field(default_factory=uint32s)
    ids: Int32s = field(default_factory=int32s)
    values: Float32s = field(default_factory=float32s)
    sizes: Uint32s = field(default_factory=uint32s)
    data: Uint8s = field(default_factory=uint8s)

    def __len__(self) -> int:
        return len(self.num_candidates)

    def __iter__(self) -> Iterator[TokenLogprob]:
        """Make an object of each token that has candidates."""
        data = self.data.tobytes()
        pieces = [data[start:end] for start, end in pairwise(accumulate(self.sizes, initial=0))]
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        entries = zip(self.ids, texts, pieces, self.values, strict=True)
        candidates = map(Candidate._make, entries)
        for count, rank in zip(self.num_candidates, self.ranks, strict=True):
            if count:
                chosen, *top = islice(candidates, count)
                yield TokenLogprob(chosen, tuple(top), rank)

    def add(self, ids: Sequence[int], values: Sequence[float], rank: int = 0) -> None:
        """Add a token: its id and logprob, then those of the most likely tokens."""
        if len(ids) != len(values):
            raise ValueError(f"{len(values)} logprobs for {len(ids)} candidates")
        self.num_candidates.append(len(ids))
        self.ranks.append(rank)
        self.ids.extend(ids)
        self.values.extend(values)

    def extend(self, later: Logprobs) -> None:
        self.num_candidates += later.num_candidates
        self.ranks += later.ranks
        self.ids += later.ids
        self.values += later.values
        self.sizes += later.sizes
        self.data += later.data

    def __add__(self, later: Logprobs) -> Logprobs:
        both = Logprobs()
        both.extend(self)
        both.extend(later)
        return both

    def name(self, bytes_of: Callable[[int], bytes]) -> None:
        """Fill in the bytes that the candidates stand for."""
        names = list(map(bytes_of, self.ids))
        self.sizes = uint32s(map(len, names))
        self.data = uint8s(b"".join(names))

    def split(self, num_tokens: Iterable[int]) -> Iterator[Logprobs]:
        """Copy the columns of so many tokens at a time."""
        token_end = candidate_end = byte_end = 0
        for count in num_tokens:
            token, token_end = token_end, token_end + count
            num_candidates = self.num_candidates[token:token_end]
            candidate, candidate_end = candidate_end, candidate_end + sum(num_candidates)
            sizes = self.sizes[candidate:candidate_end]
            byte, byte_end = byte_end, byte_end + sum(sizes)
            yield Logprobs(
                num_candidates,
                self.ranks[token:token_end],
                self.ids[candidate:candidate_end],
                self.values[candidate:candidate_end],
                sizes,
                self.data[byte:byte_end],
            )

    def check(self) -> None:
        """Raise `MalformedMessage` unless the columns agree; the codec calls it."""
        num_candidates = len(self.ids)
        require_columns(self, ("ranks",), len(self))
        require(sum(self.num_candidates) == num_candidates, "ids against num_candidates")
        require_columns(self, ("values",), num_candidates)
        total = sum(self.values)
        require(total == total, "a logprob is no number")
        if self.sizes:
            require_columns(self, ("sizes",), num_candidates)
        require(sum(self.sizes) == len(self.data), "data against sizes")

    def check_names(self) -> None:
        """Raise `MalformedMessage` unless all candidates have their bytes."""
        require_columns(self, ("sizes",), len(self.ids))

    def check_rows(self, num_tokens: Uint32s) -> None:
        """Raise `MalformedMessage` unless each row has logprobs of all its tokens, or of none."""
        require(len(self) == sum(num_tokens), "logprobs against num_tokens")
        if 0 in self.num_candidates:
            ends = accumulate(num_tokens, initial=0)
            rows = (self.num_candidates[start:end] for start, end in pairwise(ends))
            require(all(all(row) or not any(row) for row in rows), "logprobs of half a row")


def joined(
    earlier: Logprobs | None, num_earlier: int, later: Logprobs | None, num_later: int
) -> Logprobs | None:
    """Join columns of so many tokens each, either of which may be missing."""
    if earlier is None and later is None:
        return None
    return (earlier or absent(num_earlier)) + (later or absent(num_later))


def absent(num_tokens: int) -> Logprobs:
    """Return the columns of tokens without logprobs."""
    return Logprobs(_ZERO * num_tokens, _ZERO * num_tokens)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt's tokens from position `first` on, in a row; position 0 has none."""

    row: int
    first: int
    logprobs: Logprobs

    def check(self) -> None:
        """Raise `MalformedMessage` unless every token has a logprob."""
        require(self.first >= 1, "prompt logprobs out of range")
        require(0 not in self.logprobs.num_candidates, "prompt tokens without logprobs")
