"""The sequences that are on the device: their slots, and which of them decode or prefill."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from services.compute.scheduler.routes import Routes
from services.compute.scheduler.sequence import Sequence, Status
from services.compute.step import SlotDelta

_by_order = attrgetter("order")


class Residents:
    """Sequences with a slot. Lists handed out are never changed afterwards, only replaced.

    A slot's epoch grows whenever a plan describes it, so that a row says of which owner it is.
    Today's runners need only the order of one stream. `retabled` have page-table entries that the
    device does not know, `newcomers` a slot that it does not know.
    """

    __slots__ = (
        "_decoding",
        "_epochs",
        "_free_slots",
        "_prefilling",
        "_stale",
        "newcomers",
        "retabled",
        "routes",
        "running",
    )

    def __init__(self, num_slots: int) -> None:
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._epochs = [0] * num_slots
        self._decoding: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._stale = False
        self.routes = Routes(num_slots)
        self.running: dict[Sequence, None] = {}
        self.newcomers: list[Sequence] = []
        self.retabled: list[Sequence] = []

    @property
    def has_free_slot(self) -> bool:
        """Whether one more sequence can run."""
        return bool(self._free_slots)

    @property
    def decoding(self) -> list[Sequence]:
        """Those whose next step is one token, in the order of the device's rows."""
        if self._stale:
            self._settle()
        return self._decoding

    @property
    def prefilling(self) -> list[Sequence]:
        """Those with known tokens to compute before they can sample, first come first."""
        if self._stale:
            self._settle()
        return self._prefilling

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a slot; its page table is filled already."""
        if self._stale:
            self._settle()
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING
        sequence.joined = True
        self.running[sequence] = None
        self.routes.enter(sequence)
        prefilling = self._prefilling.copy()
        insort(prefilling, sequence, key=_by_order)
        self._prefilling = prefilling
        self._describe(sequence)
        self.retabled.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take the slot back; steps in flight may still have rows of it."""
        del self.running[sequence]
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        self._stale = True

    def begin_decoding(self, sequences: list[Sequence]) -> None:
        """The last known tokens of these are launched: from now on they go token by token."""
        begun = set(sequences)
        self._prefilling = [s for s in self.prefilling if s not in begun]
        self._decoding = [*self._decoding, *sequences]

    def drop_launched_out(self, sequences: set[Sequence]) -> None:
        """Plan no more rows for these, whose last token is on its way."""
        self._decoding = [s for s in self.decoding if s not in sequences]

    def youngest(self) -> Sequence:
        """The one to be preempted first: of the lowest priority, the latest to arrive."""
        return max(self.running, key=_by_order)

    def resend(self, missed: Iterable[SlotDelta]) -> None:
        """The device may have missed changes: send the whole tables again, and the settings of
        those of these slots' owners who are still here."""
        for sequence in self.running:
            sequence.table.num_sent = 0
        self.retabled = list(self.running)
        epochs = {delta.slot: delta.epoch for delta in missed}
        for sequence in self.running:
            # One that is in flight has a row in a later step, so that its settings have come.
            if epochs.get(sequence.slot) == sequence.epoch and not sequence.in_flight:
                self._describe(sequence)

    def _describe(self, sequence: Sequence) -> None:
        """Let the next plan tell the device whose the slot is."""
        slot = sequence.slot
        self._epochs[slot] += 1
        sequence.epoch = self._epochs[slot]
        self.newcomers.append(sequence)

    def _settle(self) -> None:
        self._stale = False
        decoding = [s for s in self._decoding if s.slot >= 0]
        if len(decoding) < len(self._decoding):  # the same list means: the same rows
            self._decoding = decoding
        self._prefilling = [s for s in self._prefilling if s.slot >= 0]
