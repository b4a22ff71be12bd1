"""Memory of a GPU that all ranks of a host read and write, by torch's symmetric memory.

Shape legend: T tokens, E hidden width, R ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from common.errors import ConfigError
from services.compute.distributed.ranks import Ranks
from services.compute.kernels.ranks.rank_rows import MAX_PROGRAMS, RankMemory, RankRows

ALIGNMENT = 256


def default_group(ranks: Ranks) -> dist.ProcessGroup:
    """The process group of the ranks that torch's symmetric memory finds by its name."""
    if not dist.is_initialized():
        store = torch.distributed.PrefixStore("symmetric", ranks.store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size)
    group = dist.group.WORLD
    assert group is not None
    return group


class Shared(NamedTuple):
    """A tensor that every rank has one of, under the same name."""

    own: Tensor
    addresses_R: Tensor  # int64


class SymmetricBlock:
    """One block of so many bytes on each rank, handed out in the same pieces by all of them."""

    def __init__(self, num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self._bytes = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        self._bytes.zero_()
        try:
            handle = symmetric_memory.rendezvous(self._bytes, group)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                "compute.tensor_parallel_size, compute.prefill_context_parallel_size: the GPUs "
                "cannot read one another's memory, which takes NVLink or PCIe between them on one "
                f"host ({reason}); take 1."
            ) from error
        self._handle = handle
        self._addresses: list[int] = list(handle.buffer_ptrs)
        self._used = 0
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody writes before all are zero
        pads = self.take((MAX_PROGRAMS, handle.world_size), torch.int32)
        meetings_P = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self.memory = RankMemory(handle.rank, pads.addresses_R, meetings_P)

    @staticmethod
    def num_bytes(*shapes: tuple[tuple[int, ...], torch.dtype]) -> int:
        """What tensors of these shapes take, beside the pads of up to 64 ranks."""
        sizes = [MAX_PROGRAMS * 64 * 4, *(math.prod(s) * dtype.itemsize for s, dtype in shapes)]
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        """The next piece; ValueError if it does not fit."""
        begin, size = self._used, math.prod(shape) * dtype.itemsize
        if begin + size > len(self._bytes):
            raise ValueError(f"{size} bytes are left of {len(self._bytes) - begin}")
        self._used = -(-(begin + size) // ALIGNMENT) * ALIGNMENT
        own = self._bytes[begin : begin + size].view(dtype).view(shape)
        addresses = [address + begin for address in self._addresses]
        return Shared(own, torch.tensor(addresses, dtype=torch.int64, device=own.device))

    def of_rank(self, rank: int, piece: Shared) -> Tensor:
        """The same piece of another rank, as bytes."""
        begin = piece.own.data_ptr() - self._bytes.data_ptr()
        size = (piece.own.nbytes,)
        theirs: Tensor = self._handle.get_buffer(rank, size, torch.uint8, begin)
        return theirs

    def rows(self, piece: Shared, num_rows: int) -> RankRows:
        """The first rows of a piece [T, E], as summands."""
        return RankRows(piece.own[:num_rows], piece.addresses_R, self.memory)
