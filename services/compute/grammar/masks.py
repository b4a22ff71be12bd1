"""Masks as the engine gets them, and the memory through which the mask worker hands them over."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from common.messages.failure import Failure
from services.compute.step import BoolArray, Int32Array, SlotDelta, StepPlan, StepResult

Int64Array: TypeAlias = npt.NDArray[np.int64]

NUM_PLANES = 2
NUM_THREADS = 4  # two of each plane
_HEAD_BYTES = 64
_NAME = struct.Struct("=4i")
_MAX_NAMED_BYTES = 1 << 16  # of one read: what a pipe holds


class MaskStatus(NamedTuple):
    """Which of a plan's masks are there: ready[g] is about the sample `plan.structured[g]`.

    `failures` has the samples that will never get a mask.
    """

    ready: BoolArray  # [G]
    failures: dict[int, Failure]  # by sample


class MaskSource(Protocol):
    """Makes masks of structured samples beside the engine's loop; no method waits for one."""

    def place(self, deltas: Sequence[SlotDelta]) -> None:
        """Sequences take slots; have the first masks of those with a grammar made."""
        ...

    def advance(self, plan: StepPlan, result: StepResult, skipped: frozenset[int]) -> None:
        """Take the tokens drawn by a plan's structured samples; have the next masks made."""
        ...

    def look(self, plan: StepPlan) -> MaskStatus:
        """Say which of the masks that a plan needs are there."""
        ...

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        """Copy the masks of those of the plan's structured samples that are ready [G, V / 32]."""
        ...


def mask_words(vocab_size: int) -> int:
    """Return W, the number of 32-bit words of a mask."""
    return -(-vocab_size // 32)


def stamp(epoch: int, index: int) -> int:
    """Identify a mask of a slot: its owner's epoch and the output index. Above 0."""
    return epoch << 32 | index


class MaskMemory:
    """Anonymous shared memory, seen by all processes under one file descriptor.

    The worker writes and the engine reads. Each of the worker's two processes writes a plane of its
    own, so that neither overwrites the other's masks.

    The memory itself does not say that a mask is there: a processor may show another's writes in
    another order (ARM's do), and a mask read half new, half old would let tokens through that its
    grammar forbids. A mask is there when it has been named in a pipe: its name is written after the
    mask and read before it, and pipes hand bytes over under a lock of the kernel, which orders
    memory on every processor. The row is not written again before the engine has ordered the next
    mask of its slot, also by a pipe, and by then it has copied this one. A new worker starts when
    the end of the reports has shown that both processes of the old one are gone.

    Names have a pipe of their own, which wakes nothing: the engine reads it when it looks for
    masks, and so finds each as soon as it is written. When a report named the masks of a batch, one
    late mask made all others of its batch late: 64 streams lost 10 to 17 % of a step of 1.2 ms.

    `thread_stamps[i]` is the stamp of the mask that thread i of the worker makes, 0 for none, and
    `thread_slots[i]` its slot: that sequence is at fault should the worker die.
    """

    def __init__(self, fds: tuple[int, int, int], num_slots: int, vocab_size: int) -> None:
        words = mask_words(vocab_size)
        self.fds: tuple[int, ...] = fds
        fd, self._names_out, self._names_in = fds
        size = _bytes(num_slots, words)
        self._map = mmap.mmap(fd, size)
        self.thread_slots: Int32Array = np.frombuffer(self._map, np.int32, NUM_THREADS)
        self.thread_stamps: Int64Array = np.frombuffer(self._map, np.int64, NUM_THREADS, 16)
        count = NUM_PLANES * num_slots
        self.masks_PNW: Int32Array = np.frombuffer(
            self._map, np.int32, count * words, _HEAD_BYTES
        ).reshape(NUM_PLANES, num_slots, words)

    @staticmethod
    def create(num_slots: int, vocab_size: int) -> MaskMemory:
        """Make an empty memory, in a file without a name."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("slipstream-masks")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _bytes(num_slots, mask_words(vocab_size)))
        names_out, names_in = os.pipe()
        os.set_blocking(names_out, False)
        return MaskMemory((fd, names_out, names_in), num_slots, vocab_size)

    def name(self, slot: int, plane: int, epoch: int, index: int) -> None:
        """Report a mask as written; a pipe keeps what is this short in one piece."""
        os.write(self._names_in, _NAME.pack(slot, plane, epoch, index))

    def named(self) -> Int32Array:
        """Return slot, plane, epoch and output index of the masks named since the last call."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._names_out, _MAX_NAMED_BYTES)
        return np.frombuffer(data, np.int32).reshape(-1, 4)

    def close(self) -> None:
        """Close the descriptors; the memory goes with its last user."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


def _bytes(num_slots: int, words: int) -> int:
    return _HEAD_BYTES + NUM_PLANES * num_slots * 4 * words
