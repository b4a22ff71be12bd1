"""Who runs next: the waiting queue, fair between clients.

After the virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI
2024): each client's counter grows with the tokens that were computed for it, and the client with
the lowest goes first. One that comes back after a time without requests begins at the lowest of
those that have some: nobody saves up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.compute.scheduler.sequence import ClientShare, Sequence

OUTPUT_WEIGHT = 2
"""What a generated token counts where a prompt's counts one, as in the paper."""

MAX_SHARES = 1024  # clients remembered; those without requests are forgotten first


class Shares:
    """The clients' counters. A client is a key's name, or an address where there are no keys."""

    def __init__(self) -> None:
        self._shares: dict[str, ClientShare] = {}

    @property
    def num_active(self) -> int:
        """Clients that have requests here."""
        return sum(share.num_open > 0 for share in self._shares.values())

    def of(self, client: str) -> ClientShare:
        share = self._shares.get(client)
        if share is None:
            if len(self._shares) >= MAX_SHARES:
                self._shares = {name: s for name, s in self._shares.items() if s.num_open}
            share = self._shares[client] = ClientShare(client)
        return share

    def enter(self, share: ClientShare) -> None:
        """One more sequence of a client is open."""
        if not share.num_open:
            lowest = min((s.tokens for s in self._shares.values() if s.num_open), default=0)
            share.tokens = max(share.tokens, lowest)
        share.num_open += 1

    def charge(self, sequence: Sequence) -> None:
        """Count what has been computed since the last call; what is computed again is free."""
        done, charged = sequence.num_computed_tokens, sequence.charged
        if done > charged:
            sequence.charged = done
            new_outputs = max(done - max(charged, sequence.prompt_len), 0)
            sequence.share.tokens += done - charged + (OUTPUT_WEIGHT - 1) * new_outputs

    def busiest(self) -> ClientShare | None:
        """The client with the most running sequences; of several, that with the most tokens."""
        running = (share for share in self._shares.values() if share.num_running)
        return max(running, key=lambda share: (share.num_running, share.tokens), default=None)


class WaitingQueue:
    """Sequences that wait to run, for the first time or again after a preemption.

    A lower priority number goes first (as in vLLM), then the client whose turn it is, then the
    earlier arrival.
    """

    def __init__(self) -> None:
        self._lines: dict[int, dict[ClientShare, list[tuple[int, Sequence]]]] = {}
        self._num_waiting = 0
        self.num_resumable = 0  # of those here, how many have run before

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for lines in self._lines.values():
            for line in lines.values():
                yield from (sequence for _, sequence in line)

    def add(self, sequence: Sequence) -> None:
        priority, arrival = sequence.order
        lines = self._lines.setdefault(priority, {})
        insort(lines.setdefault(sequence.share, []), (arrival, sequence), key=_arrival)
        self._num_waiting += 1
        self.num_resumable += sequence.has_run

    def remove(self, sequence: Sequence) -> None:
        priority, arrival = sequence.order
        lines = self._lines.get(priority, {})
        line = lines.get(sequence.share, [])
        at = bisect_left(line, arrival, key=_arrival)
        if at == len(line) or line[at][1] is not sequence:
            raise RuntimeError(f"{sequence.attempt} does not wait")
        del line[at]
        if not line:
            del lines[sequence.share]
        if not lines:
            del self._lines[priority]
        self._num_waiting -= 1
        self.num_resumable -= sequence.has_run

    def first(self, allow_new: bool) -> Sequence | None:
        """The next one to run; with `allow_new` unset, of those that have run before."""
        if not (self._num_waiting if allow_new else self.num_resumable):
            return None
        for priority in sorted(self._lines):
            heads = map(_head if allow_new else _resumable, self._lines[priority].values())
            first = min(filter(None, heads), key=_turn, default=None)
            if first is not None:
                return first
        return None

    def last_of_the_longest(self) -> Sequence | None:
        """The latest new one of the client with the most that wait."""
        lines = [line for lines in self._lines.values() for line in lines.values()]
        longest = max(lines, key=len, default=[])
        return next((s for _, s in reversed(longest) if not s.has_run), None)


def _arrival(entry: tuple[int, Sequence]) -> int:
    return entry[0]


def _turn(sequence: Sequence) -> tuple[int, int, int]:
    return *sequence.share.turn, sequence.order[1]


def _head(line: list[tuple[int, Sequence]]) -> Sequence | None:
    return line[0][1]


def _resumable(line: list[tuple[int, Sequence]]) -> Sequence | None:
    return next((sequence for _, sequence in line if sequence.has_run), None)
