"""The tensors of a GGUF file: as codes and scales, or as the numbers that these stand for."""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ModelError
from common.gguf.file import TYPES
from common.gguf.folder import INDEX_NAME
from common.model_folder import read_json
from common.telemetry.log import Progress
from services.compute.models.gguf_blocks import PLAIN, UNPACK, Groups, packed_groups
from services.compute.models.weights import names_from
from services.compute.quantization.packed import UNCUT, Cut, Packed, joined

CHUNK_NUMBERS = 1 << 22
"""Dequantised at a time: 16 MiB as float32, and as much again between steps."""

_BLOCKS = {kind.name: kind for kind in TYPES.values()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the index says, and its bytes [rows, bytes of a row], mapped from the file."""

    type: str
    shape: tuple[int, ...]
    rows: Tensor
    head_dim_of_pairs: int = 0  # rows of a head stand as 0, half, 1, half + 1, ...
    plus_one: bool = False  # the file holds the number and 1

    def in_order(self) -> Tensor:
        """The rows as Hugging Face has them."""
        if not self.head_dim_of_pairs:
            return self.rows
        heads = self.rows.view(-1, self.head_dim_of_pairs // 2, 2, self.rows.shape[-1])
        return heads.transpose(1, 2).reshape(self.rows.shape)

    def copy_to(self, target: Tensor) -> None:
        """Dequantise into a tensor of the same shape, on its device."""
        out = target.view(len(self.rows), -1)
        for first, rows in self._chunks(target.device):
            chunk = out[first : first + len(rows)]
            chunk.copy_(self._values(rows).view_as(chunk))

    def packed(self, device: torch.device) -> Packed:
        """A quantised matrix as codes and scales."""
        return joined([packed_groups(self._groups(r), len(r)) for _, r in self._chunks(device)])

    def _chunks(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Some rows at a time, with the number of the first of them."""
        rows = self.in_order()
        step = max(1, CHUNK_NUMBERS * len(rows) // math.prod(self.shape))
        for first in range(0, len(rows), step):
            yield first, rows[first : first + step].to(device)

    def _groups(self, rows: Tensor) -> Groups:
        return UNPACK[self.type](rows.view(-1, _BLOCKS[self.type].block_bytes))

    def _values(self, rows: Tensor) -> Tensor:
        dtype = PLAIN.get(self.type)
        values = rows.view(dtype) if dtype else self._groups(rows).values()
        return values.float() - 1.0 if self.plus_one else values


class GgufFiles:
    """A `Checkpoint` that `common.gguf` made a folder of: its index names the tensors as Hugging
    Face does."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        index = read_json(folder, INDEX_NAME, required=True)
        self._mapped = {name: _mapped(folder / name) for name in index["files"]}
        self._entries: Mapping[str, Mapping[str, Any]] = index["tensors"]
        self._modules = {name.rpartition(".")[0] for name in self._entries}
        self._names = sorted(self._entries)
        self._left = set(self._entries)
        size = sum(len(data) for data in self._mapped.values())
        self._progress = Progress("loading weights", len(self._left), size)

    def has_module(self, name: str) -> bool:
        return name in self._modules

    def copy(self, name: str, shape: tuple[int, ...], target: Tensor, cut: Cut = UNCUT) -> None:
        source = self.take(name, shape)
        if target.shape == shape and cut.rows is None:
            source.copy_to(target)
        else:
            whole = target.new_empty(shape)
            source.copy_to(whole)
            target.copy_(cut.of_numbers(whole))

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor of this shape as it lies in the file; ModelError if it has another one."""
        source = self.stored(name)
        if source.shape != shape:
            raise ModelError(
                f"{self._folder}: tensor {name} is {list(source.shape)}, the GGUF file's fields "
                f"make it {list(shape)}."
            )
        if name in self._left:  # an embedding is read once more where it is the head
            self._left.discard(name)
            self._progress.advance(source.rows.nbytes)
        return source

    def packed(self, name: str, shape: tuple[int, int]) -> Packed | None:
        name = f"{name}.weight"
        if self.stored(name).type in PLAIN:
            return None
        return self.take(name, shape).packed(self._device)

    def skip(self, *prefixes: str) -> None:
        for prefix in prefixes:
            self._left.difference_update(names_from(prefix, self._names))

    def finish(self) -> None:
        self._mapped.clear()
        if self._left:
            some = ", ".join(sorted(self._left)[:5])
            raise ModelError(
                f"{self._folder}: {len(self._left)} tensors do not belong to the architecture that "
                f"the GGUF file names ({some})."
            )

    def stored(self, name: str) -> StoredTensor:
        """A tensor as it lies in the file; ModelError if there is none of this name."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self._folder}: the GGUF file has no tensor for {name}.")
        blocks, shape = _BLOCKS[entry["type"]], tuple(entry["shape"])
        row_bytes = shape[-1] // blocks.block_size * blocks.block_bytes
        size = math.prod(shape[:-1]) * row_bytes
        data = self._mapped[entry["file"]][entry["offset"] :][:size]
        # each number of a vector counts as a row
        width = row_bytes if len(shape) > 1 else blocks.block_bytes
        return StoredTensor(
            blocks.name,
            shape,
            data.view(-1, width),
            entry.get("head_dim_of_pairs", 0),
            entry.get("plus_one", False),
        )


def _mapped(path: Path) -> Tensor:
    """The bytes of a file, for reading: a private mapping would count as memory, which a file may
    be larger than."""
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            return torch.frombuffer(data, dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); has the GGUF file been moved?"
        ) from error
