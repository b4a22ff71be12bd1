"""The tensors of a GGUF file, dequantised when they are taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from services.compute.models.gguf_blocks import PLAIN, UNPACK

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
        rows, out = self.in_order(), target.view(len(self.rows), -1)
        step = max(1, CHUNK_NUMBERS // out.shape[-1])
        for first in range(0, len(rows), step):
            chunk = out[first : first + step]
            chunk.copy_(self._values(rows[first : first + step].to(target.device)).view_as(chunk))

    def _values(self, rows: Tensor) -> Tensor:
        if dtype := PLAIN.get(self.type):
            values = rows.view(dtype)
        else:
            values = UNPACK[self.type](rows.view(-1, _BLOCKS[self.type].block_bytes)).values()
        return values.float() - 1.0 if self.plus_one else values


class GgufWeights:
    """What `common.gguf` made a folder of: its index names the tensors as Hugging Face does."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self.dtype = dtype
        self._device = device
        index = read_json(folder, INDEX_NAME, required=True)
        self._mapped = {name: _mapped(folder / name) for name in index["files"]}
        self._entries: Mapping[str, Mapping[str, Any]] = index["tensors"]
        self._left = set(self._entries)
        size = sum(len(data) for data in self._mapped.values())
        self._progress = Progress("loading weights", len(self._left), size)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        target = torch.empty(shape, dtype=self.dtype, device=self._device)
        self._copy(name, target)
        return target

    def stack(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor:
        shape = (sum(rows), columns) if columns else (sum(rows),)
        target = torch.empty(shape, dtype=self.dtype, device=self._device)
        first = 0
        for name, count in zip(names, rows, strict=True):
            self._copy(name, target[first : first + count])
            first += count
        return target

    def has(self, name: str) -> bool:
        return name in self._entries

    def skip(self, *prefixes: str) -> None:
        self._left = {name for name in self._left if not name.startswith(prefixes)}

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

    def _copy(self, name: str, target: Tensor) -> None:
        source = self.stored(name)
        if source.shape != target.shape:
            raise ModelError(
                f"{self._folder}: tensor {name} is {list(source.shape)}, the GGUF file's fields "
                f"make it {list(target.shape)}."
            )
        source.copy_to(target)
        self._left.discard(name)
        self._progress.advance(source.rows.nbytes)


def _mapped(path: Path) -> Tensor:
    try:
        return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); has the GGUF file been moved?"
        ) from error
