"""The head that the settings name, for a model: all of its folder but the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.architectures import (
    ARCHITECTURES,
    architecture_of,
    check_values,
    family_of,
    language_fields,
)
from common.decoder_shape import DecoderShape, read_shape
from common.draft_method import num_next_token_layers, said_method
from common.errors import ConfigError, ModelError
from common.model_folder import locate, read_model_config
from common.speculative import WHERE, SpeculativeSettings

MOST_HEADS = 16  # of Medusa: several times what was trained
LAYER_FIELDS = "transformer_layer_config"  # in folders of speculators (vLLM's)
LAYERS = ("llama", "qwen2", "eagle3")  # parts of names of architectures: what is like Llama's
NUM_STATES = 3  # of the model, that EAGLE-3 sees
LAYER_NUMBERS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_ONLY: Mapping[str, tuple[Any, ...]] = {
    "fc_norm": (False,),
    "norm_output": (False,),
    "parallel_draft_step": (1,),
    "parallel_drafting": (False,),
    "use_aux_hidden_state": (True,),
    "use_mtp_layernorm": (False,),
}
"""Of fields that heads are trained with, the values with which they are computed here."""


@dataclass(frozen=True, slots=True)
class HeadFolder:
    method: str
    folder: Path  # the model's own where the head is in its files
    raw: Mapping[str, Any]
    shape: DecoderShape  # of a layer
    num_layers: int = 1  # each of which sees what the one before it makes
    num_heads: int = 0  # of Medusa: each makes one draft; 0: as many as are wanted
    num_blocks: int = 0  # of each of these

    @property
    def has_layer(self) -> bool:
        """Whether it keeps something of each token beside the model's state."""
        return not self.num_heads

    def seen_layers(self, num_layers: int) -> tuple[int, ...]:
        """Of a model with so many, those whose inputs it sees; behind the last: what that makes."""
        return eagle3_layers(self.raw, num_layers) if self.method == "eagle3" else (num_layers,)

    def page_bytes(self, page_tokens: int, itemsize: int) -> int:
        """What a page is larger by: each layer has the states that it sees there."""
        state_bytes = page_tokens * self.shape.hidden_size * itemsize
        if not self.has_layer:
            return state_bytes
        layer_bytes = self.shape.layer_cache_bytes(page_tokens, itemsize)
        return self.num_layers * (state_bytes + layer_bytes)


class DraftedFor(NamedTuple):
    """The model that a head is to draft for."""

    folder: Path
    raw: Mapping[str, Any]  # its config.json
    shape: DecoderShape


def read_head(drafts: SpeculativeSettings | None, model: DraftedFor) -> HeadFolder | None:
    """None if no head drafts; ConfigError for one that cannot draft for this model."""
    if drafts is None or not drafts.is_head:
        return None
    try:
        if drafts.method == "mtp":
            return _next_token(model, drafts.max_drafts)
        folder = locate(drafts.model, drafts.revision)
        raw = read_model_config(folder)
        if drafts.method == "medusa":
            return _medusa(folder, raw, model, drafts)
        return _eagle(folder, raw, model, drafts)
    except ModelError as error:
        raise ConfigError(f"{WHERE}: {drafts.model or drafts.method}: {error}") from error


def eagle3_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Of a model with so many, those whose inputs such a head sees."""
    layers = _numbers(raw)
    if not layers:
        # SpecForge's and ModelOpt's trainers see what layers make, by default 1, n/2 - 1 and
        # n - 4, as TensorRT-LLM does with such heads: [1, 17, 32] of 36 in nvidia/
        # gpt-oss-120b-Eagle3-long-context, which vLLM takes a layer too early. Others write
        # there what vLLM takes as it stands, numbers of inputs: [24, 30, 36] in nvidia/
        # gpt-oss-120b-Eagle3-v3. The first number tells them apart, as in SGLang for DeepSeek's
        # models: nobody is known to train with the input of layer 1.
        inner = _numbers(raw.get("eagle_config") or {})
        layers = tuple(layer + (inner[0] == 1) for layer in inner)
    layers = layers or (2, num_layers // 2, num_layers - 3)
    if len(layers) != NUM_STATES or not all(0 <= layer <= num_layers for layer in layers):
        raise ModelError(
            f"config.json: the head sees the layers {list(layers)}, and the model has "
            f"{num_layers}; {NUM_STATES} of them are needed."
        )
    return layers


def _numbers(fields: Mapping[str, Any]) -> tuple[int, ...]:
    numbers = fields.get(LAYER_NUMBERS) or []
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise ModelError(
            f"config.json: {LAYER_NUMBERS} {str(numbers)[:60]!r} is not supported; it has to be a "
            "list of numbers of layers."
        )
    return tuple(numbers)


def _eagle(
    folder: Path, raw: Mapping[str, Any], model: DraftedFor, drafts: SpeculativeSettings
) -> HeadFolder:
    name, fields = architecture_of(raw), _layer_fields(raw)
    names = f"{name} {architecture_of(fields)}".lower()
    other = "eagle" if drafts.method == "eagle3" else "eagle3"
    if said_method(raw) == other or not any(layer in names for layer in LAYERS):
        raise ModelError(
            f"config.json names the architecture {name[:80]}, which is no head of the method "
            f"{drafts.method}; is it one of {other}?"
        )
    fields["architectures"] = ["LlamaForCausalLM"]
    shape = read_shape(fields)
    if shape.num_layers != 1:
        raise ModelError(
            f"config.json: num_hidden_layers is {shape.num_layers}; heads of one layer are "
            "supported."
        )
    for size in ("vocab_size", "hidden_size"):
        own, wanted = getattr(shape, size), getattr(model.shape, size)
        if own != wanted:
            raise ModelError(
                f"config.json: {size} is {own}, and {wanted} in the model that it is to draft for; "
                "take a head that was trained for this model."
            )
    if drafts.method == "eagle3":
        check_values(fields, EAGLE3_ONLY)
        eagle3_layers(fields, model.shape.num_layers)  # says now what is not supported
    return HeadFolder(drafts.method, folder, fields, shape)


def _layer_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Those of config.json in one table: vLLM's older folders and those of speculators have the
    layer's in one of their own, and ModelOpt has flags in `eagle_config`."""
    fields = {name: value for name, value in raw.items() if value is not None}
    if isinstance(layer := fields.pop("model", None), Mapping):
        fields = {**fields, **layer}
    if isinstance(layer := fields.get(LAYER_FIELDS), Mapping):
        # left out it is true of these folders, as vLLM reads them
        fields = {"norm_before_residual": True, **fields, **layer}
    if isinstance(flags := fields.get("eagle_config"), Mapping):
        # but the numbers of layers, which are counted in another way there
        fields = {**{name: flags[name] for name in flags if name != LAYER_NUMBERS}, **fields}
    return fields


def _medusa(
    folder: Path, raw: Mapping[str, Any], model: DraftedFor, drafts: SpeculativeSettings
) -> HeadFolder:
    num_heads = _count(raw, "medusa_num_heads", "num_heads")
    num_blocks = _count(raw, "medusa_num_layers", "num_hidden_layers")
    if drafts.num_speculative_tokens > num_heads:
        raise ModelError(
            f"there are {num_heads} heads, each of which makes one draft; lower "
            f"num_speculative_tokens, which is {drafts.num_speculative_tokens}."
        )
    sizes = {"num_heads": num_heads, "num_blocks": num_blocks}
    return HeadFolder("medusa", folder, raw, _one_layer(model.shape), **sizes)


def _count(raw: Mapping[str, Any], name: str, in_vllm: str) -> int:
    value = raw.get(name) or raw.get(in_vllm)
    if not isinstance(value, int) or not 1 <= value <= MOST_HEADS:
        raise ModelError(
            f"config.json: {name} has to be from 1 to {MOST_HEADS}, not {str(value)[:40]}."
        )
    return value


def _next_token(model: DraftedFor, max_drafts: int) -> HeadFolder:
    """Of the layers as many as there may be drafts: more would make none."""
    fields = language_fields(model.raw)
    if not ARCHITECTURES[family_of(model.raw)].has_next_tokens:
        raise ModelError(
            "models of this family have no layers that predict further tokens, or in another form; "
            "those of DeepSeek V3 and GLM-4.5 are read. Take another method."
        )
    num_layers = min(num_next_token_layers(fields), max_drafts)
    return HeadFolder("mtp", model.folder, fields, _one_layer(model.shape), num_layers)


def _one_layer(shape: DecoderShape) -> DecoderShape:
    experts = None if shape.experts is None else replace(shape.experts, is_dense=(False,))
    return replace(shape, num_layers=1, experts=experts)
