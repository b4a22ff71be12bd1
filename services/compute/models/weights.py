"""Where a model takes its tensors from: safetensors files, or random numbers in their place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ModelError
from common.model_folder import read_json
from common.telemetry.log import Progress


class WeightSource(Protocol):
    """Hands out the tensors of one checkpoint, by name, cast and on the device."""

    @property
    def dtype(self) -> torch.dtype: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this name; raises ModelError if it is missing or of another shape."""
        ...

    def stack(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor:
        """Several [rows, columns] matrices on top of one another (columns 0: vectors)."""
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        ...

    def skip(self, *prefixes: str) -> None:
        """Accept tensors that are not needed, whose names begin so, if they are there."""
        ...

    def finish(self) -> None:
        """Raise ModelError if the checkpoint holds tensors that were not taken."""
        ...


SCALE = 0.02
"""Standard deviation, as models of this kind are initialised."""


class DummyWeights:
    """Seeded random tensors of whatever shape is asked for; norms' weights are near one.

    The values depend on the seed and on the kind of device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape; the order of calls decides its values."""
        # drawn where they are used: 8 billion of them take a minute on a CPU
        values = torch.randn(shape, generator=self._generator, device=self._device).mul_(SCALE)
        if name.endswith("norm.weight"):
            values.add_(1.0)
        return values.to(dtype=self.dtype)

    def stack(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor:
        shape = (sum(rows), columns) if columns else (sum(rows),)
        return self.take(names[0], shape)

    def has(self, name: str) -> bool:
        return True

    def skip(self, *prefixes: str) -> None:
        pass

    def finish(self) -> None:
        pass


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PREFIX = "model."
"""What names of a decoder's tensors begin with, but for its head. Folders of embedding models often
leave it out: they hold what is inside of `model`, and no head."""

BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".masked_bias")
"""Endings of names of tensors that old checkpoints hold and no layer needs."""


class SafetensorsWeights:
    """The tensors of a model folder, copied one at a time into memory of their own.

    Copied even where no cast is needed: mapped tensors are aligned to 8 bytes only, and their
    pages would be faulted in while requests wait.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self.dtype = dtype
        self._device = device
        self._files: dict[Path, Any] = {}
        self._where = self._locate()
        self._is_bare = "embed_tokens.weight" in self._where
        if self._is_bare:
            self._where = {_with_prefix(name): path for name, path in self._where.items()}
        self._left = {name for name in self._where if not name.endswith(BUFFERS)}
        paths = set(self._where.values())
        size = sum(path.stat().st_size for path in paths if path.is_file())
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
        return name in self._where

    def skip(self, *prefixes: str) -> None:
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def finish(self) -> None:
        self._files.clear()
        if self._left:
            some = ", ".join(sorted(self._left)[:5])
            raise ModelError(
                f"{self._folder}: {len(self._left)} tensors do not belong to the architecture that "
                f"config.json names ({some}); the folder mixes two models, or is quantized in a "
                "way that is not supported."
            )

    def _copy(self, name: str, target: Tensor) -> None:
        path = self._where.get(name)
        if path is None:
            raise ModelError(
                f"{self._folder}: tensor {name} is missing; config.json and the safetensors files "
                "are not of the same model, or the download is not complete."
            )
        source: Tensor = self._open(path).get_tensor(
            name.removeprefix(PREFIX) if self._is_bare else name
        )
        if source.shape != target.shape:
            raise ModelError(
                f"{path}: tensor {name} is {list(source.shape)}, config.json makes it "
                f"{list(target.shape)}."
            )
        if not source.dtype.is_floating_point or source.dtype.itemsize < 2:
            raise ModelError(
                f"{path}: tensor {name} is {source.dtype}; quantized weights are not supported."
            )
        target.copy_(source)
        self._left.discard(name)
        self._progress.advance(source.nbytes)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{path} is not a readable safetensors file ({error}); download it again."
                ) from None
        return self._files[path]

    def _locate(self) -> dict[str, Path]:
        index_path = self._folder / INDEX_NAME
        if not index_path.is_file():
            return self._locate_without_index()
        weight_map = read_json(self._folder, INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index_path} has no weight_map; download it again.")
        where = {}
        for name, file_name in weight_map.items():
            if Path(str(file_name)).name != file_name:
                raise ModelError(f"{index_path} names a file outside the folder: {file_name!r}.")
            where[str(name)] = self._folder / str(file_name)
        return where

    def _locate_without_index(self) -> dict[str, Path]:
        single = self._folder / SINGLE_NAME
        paths = [single] if single.is_file() else sorted(self._folder.glob("*.safetensors"))
        if paths:
            return {name: path for path in paths for name in self._open(path).keys()}
        other = sorted(
            p.name for p in self._folder.glob("*") if p.suffix in (".bin", ".pt", ".pth")
        )
        if other:
            raise ModelError(
                f"{self._folder} holds {other[0]}, which can run code when it is opened; only "
                "safetensors are read. Convert it: load the model in transformers and call "
                "save_pretrained, in an environment that you trust it in."
            )
        raise ModelError(
            f"{self._folder} holds no safetensors file; give a Hugging Face model folder with "
            "weights, or use --load-format dummy."
        )


def _with_prefix(name: str) -> str:
    return name if name.startswith("lm_head.") else PREFIX + name
