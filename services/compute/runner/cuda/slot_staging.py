"""A step's newcomers on their way to the device: mostly one copy and one launch for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from services.compute.kernels.enter_slots import ENTRY_INTS, HEADER_INTS, SlotEntry, pack_entries
from services.compute.runner.cuda.staging import Staging


class SlotStaging:
    """Uploads entries and has them entered, in stream order before their step.

    Pinned memory is there from the start: to get 0.5 MB of it for each newcomer took 0.1 ms, and
    the device waited. Only steps whose newcomers bring penalties, bias or early stops come here.
    """

    __slots__ = ("_enter", "_size", "_staging")

    def __init__(
        self,
        packed: Tensor,
        num_buffers: int,
        wait: Callable[[], None],
        enter: Callable[[], None],
    ) -> None:
        """`num_buffers` and `wait` as for `Staging`; `enter` launches what is in `packed`."""
        self._size = len(packed)
        self._staging = Staging(packed, num_buffers, wait)
        self._enter = enter

    def upload(self, entries: Sequence[SlotEntry]) -> int:
        """Start the copies and launches; return the last upload's number, 0 if there is none."""
        last = 0
        for part in self._parts(entries):
            last = self._staging.upload(pack_entries(part, self._staging.buffer()))
            self._enter()
        return last

    def done(self, upload: int) -> None:
        """The device is past this upload."""
        self._staging.done(upload)

    def _parts(self, entries: Sequence[SlotEntry]) -> Iterator[list[SlotEntry]]:
        """Entries that fit into one upload together; any one of them does alone."""
        part: list[SlotEntry] = []
        size = HEADER_INTS
        for entry in entries:
            num_ints = ENTRY_INTS + entry.num_ints
            if part and size + num_ints > self._size:
                yield part
                part, size = [], HEADER_INTS
            part.append(entry)
            size += num_ints
        if part:
            yield part
