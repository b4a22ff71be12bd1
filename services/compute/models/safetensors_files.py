"""The safetensors files of a model folder: which tensor is in which, and what was not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ModelError
from common.model_folder import read_json
from common.telemetry.log import Progress
from services.compute.models.weights import names_from
from services.compute.quantization.format import WeightFormat
from services.compute.quantization.packed import UNCUT, Cut, Packed

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PREFIX = "model."
"""What names of a decoder's tensors begin with, but for its head. Folders of embedding models often
leave it out: they hold what is inside of `model`, and no head."""

NOT_NEEDED = (
    *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".masked_bias"),
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale"),
    *(".k_proj.output_scale", ".v_proj.output_scale"),
)
"""Endings of names of tensors that no layer needs: buffers of old checkpoints, and scales of a
smaller KV cache, which has one here for each token and head."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor [X, ...] with something of each of X experts, which goes by a name for each; one
    number is all experts', of which a tensor before it in the list says how many there are."""

    ending: str  # of its name
    each: str  # the ending instead; {} is the expert's number
    transposed: bool = False  # of each [inputs, outputs]


class SafetensorsFiles:
    """A `Checkpoint` of a model folder."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        quantization: WeightFormat | None = None,
        stacks: Sequence[Stack] = (),
    ) -> None:
        self.where = str(folder)
        self._quantization = quantization
        self._folder = folder
        self._device = device
        self._files: dict[Path, Any] = {}
        self._path_of = self._locate()
        self._is_bare = "embed_tokens.weight" in self._path_of
        if self._is_bare:
            self._path_of = {_with_prefix(name): path for name, path in self._path_of.items()}
        self._part_of: dict[str, tuple[str, int, bool]] = {}  # whole, number, and if transposed
        num_experts: dict[str, int] = {}  # by what names of a layer's stacks begin with
        for stack in stacks:
            self._take_apart(stack, num_experts)
        self._modules = {name.rpartition(".")[0] for name in self._path_of}
        self._names = sorted(self._path_of)
        self._left = {name for name in self._path_of if not name.endswith(NOT_NEEDED)}
        paths = set(self._path_of.values())
        size = sum(path.stat().st_size for path in paths if path.is_file())
        self._progress = Progress("loading weights", len(self._left), size)

    def has(self, name: str) -> bool:
        return name in self._path_of

    def has_module(self, name: str) -> bool:
        return name in self._modules

    def read(self, name: str) -> Tensor:
        contiguous = torch.contiguous_format  # a transposed part of a stack is not
        return self._get(name).to(self._device, copy=True, memory_format=contiguous)

    def packed(self, name: str, shape: tuple[int, int]) -> Packed | None:
        if self._quantization is None:
            return None
        return self._quantization.read(self, name, shape)

    def copy(self, name: str, shape: tuple[int, ...], target: Tensor, cut: Cut = UNCUT) -> None:
        source = self._get(name)
        if source.shape != shape:
            raise ModelError(
                f"{self._path_of[name]}: tensor {name} is {list(source.shape)}, config.json makes "
                f"it {list(shape)}."
            )
        if not source.dtype.is_floating_point or source.dtype.itemsize < 2:
            raise ModelError(
                f"{self._path_of[name]}: tensor {name} is {source.dtype}, and config.json does not "
                "say how it is quantized; take the model's own config.json."
            )
        target.copy_(cut.of_numbers(source))  # the file is mapped: no more of it is read

    def skip(self, *prefixes: str) -> None:
        for prefix in prefixes:
            self._left.difference_update(names_from(prefix, self._names))

    def finish(self) -> None:
        # writers of GPTQ add biases of zeros to maps that have none
        left = [name for name in sorted(self._left) if not self._is_empty_bias(name)]
        self._files.clear()
        if left:
            some = ", ".join(left[:5])
            raise ModelError(
                f"{self._folder}: {len(left)} tensors do not belong to the architecture that "
                f"config.json names ({some}); the folder mixes two models, or is quantized in a "
                "way that is not supported."
            )

    def _is_empty_bias(self, name: str) -> bool:
        return name.endswith(".bias") and not torch.any(self._tensor(name))

    def _get(self, name: str) -> Tensor:
        if name not in self._path_of:
            raise ModelError(
                f"{self._folder}: tensor {name} is missing; config.json and the safetensors files "
                "are not of the same model, or the download is not complete."
            )
        source = self._tensor(name)
        self._left.discard(name)
        self._progress.advance(source.nbytes)
        return source

    def _tensor(self, name: str) -> Tensor:
        file = self._open(self._path_of[name])
        whole_name, number, transposed = self._part_of.get(name, (name, None, False))
        stack = file.get_slice(self._in_file(whole_name))
        if number is None or not stack.get_shape():
            whole: Tensor = file.get_tensor(self._in_file(whole_name))
            return whole
        part: Tensor = stack[number]
        return part.t() if transposed else part

    def _in_file(self, name: str) -> str:
        return name.removeprefix(PREFIX) if self._is_bare else name

    def _take_apart(self, stack: Stack, num_experts: dict[str, int]) -> None:
        for name in [name for name in self._path_of if name.endswith(stack.ending)]:
            path = self._path_of.pop(name)
            begin = name.removesuffix(stack.ending)
            shape = self._open(path).get_slice(self._in_file(name)).get_shape()
            num_experts[begin] = shape[0] if shape else num_experts.get(begin, 0)
            for number in range(num_experts[begin]):
                each = begin + stack.each.format(number)
                self._path_of[each] = path
                self._part_of[each] = name, number, stack.transposed

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
        path_of = {}
        for name, file_name in weight_map.items():
            if Path(str(file_name)).name != file_name:
                raise ModelError(f"{index_path} names a file outside the folder: {file_name!r}.")
            path_of[str(name)] = self._folder / str(file_name)
        return path_of

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
