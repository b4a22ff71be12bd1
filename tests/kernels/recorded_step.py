"""A step on a GPU whose launches are written down instead of launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.compute.kernels.choices import Choices
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.kernels.rows.quantized_rows import QuantizedRows, RowForm
from services.compute.kernels.step.step_buffers import AttentionCall, StepInputs
from services.compute.layers import kernel_step
from services.compute.layers.kernel_experts import ExpertProduct
from services.compute.layers.kernel_ranks import OneRank
from services.compute.layers.kernel_step import (
    KernelDevice,
    KernelStep,
    LayerCache,
    StreamBuffers,
)
from services.compute.layers.parts import Activation, Hidden
from services.compute.layers.scratch import Scratch
from services.compute.layers.weighted_layers import KernelLinears, Linear
from services.compute.models.decoder import Decoder
from services.compute.models.families import read_config
from services.compute.models.weights import DummyWeights

CPU = torch.device("cpu")
MAX_TOKENS, HIDDEN, INNER, LAYERS = 8, 32, 48, 3
RAW: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "head_dim": 8,
}


class Recorder:
    """Product, attention and kernels that write down what they are asked for."""

    def __init__(self, takes_norms: bool, can_gate: bool) -> None:
        self.log: list[str] = []
        self.normed_inputs: list[NormedInput] = []
        self._takes_norms, self._can_gate = takes_norms, can_gate
        self.fused = self
        self.norms_behind = False

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        assert x_TI.data_ptr() != out_TO.data_ptr()
        assert (len(out_TO), out_TO.shape[1]) == (len(x_TI), len(linear.weight_OI))
        self.log.append("product")

    def row_form(self, num_tokens: int, linear: Linear) -> None:
        return None

    def can_gate(self, num_tokens: int, linear: Linear) -> bool:
        return self._can_gate

    def gated(self, x_TI: Tensor, linear: Linear, activation: Activation, out_TF: Tensor) -> None:
        self.log.append(f"gated {activation}")

    def can_norm(self, num_tokens: int, linear: Linear, norms_behind: bool) -> bool:
        self.norms_behind = norms_behind
        return self._takes_norms

    def normed(self, normed: NormedInput, linear: Linear, out_TO: Tensor) -> None:
        self.log.append("normed product")
        self.normed_inputs.append(normed)

    def normed_gated(
        self, normed: NormedInput, linear: Linear, activation: Activation, out_TF: Tensor
    ) -> None:
        self.log.append(f"normed gated {activation}")
        self.normed_inputs.append(normed)

    def plan(self, num_tokens: int) -> None:
        self.log.append("plan")

    def attend(self, call: AttentionCall) -> None:
        self.log.append("attend")

    def add_norm(
        self, x_TE: Tensor, delta_TE: Tensor | None, norm: object, *_: Any, **__: Any
    ) -> None:
        parts = ["add"] * (delta_TE is not None) + ["norm"] * (norm is not None)
        self.log.append(" ".join(parts))

    def rotate_and_store(self, *_: Any, **__: Any) -> None:
        self.log.append("rotate")

    def act_mul(self, wide: Tensor, out: Tensor, activation: str, **__: Any) -> None:
        self.log.append(f"{activation} * up")

    def quantize_rows(self, x: Tensor, rows: QuantizedRows, **__: Any) -> None:
        self.log.append("quantize")

    def activate(self, x: Tensor, out: Tensor, activation: str, **_: Any) -> None:
        self.log.append(activation)


class Quantizing(Recorder):
    """Takes rows of 16 bits up to a limit, as products with weights of 4 bits do."""

    def __init__(self, limit: int) -> None:
        super().__init__(takes_norms=False, can_gate=False)
        self._limit = limit

    def row_form(self, num_tokens: int, linear: Linear) -> RowForm | None:
        return RowForm("int16", sum_inputs=16) if num_tokens <= self._limit else None

    def __call__(self, x_TI: Tensor | QuantizedRows, linear: Linear, out_TO: Tensor) -> None:
        assert isinstance(x_TI, QuantizedRows) == (len(out_TO) <= self._limit)


def decoder_of(name: str = "LlamaForCausalLM", **changes: Any) -> Decoder[Linear]:
    config = read_config({"architectures": [name], **RAW, **changes})
    return config.build(
        DummyWeights(torch.float32, CPU), KernelLinears(torch.float32, keeps_dense=False)
    )


def run(
    decoder: Decoder[Linear],
    num_tokens: int,
    recorder: Recorder,
    patch: pytest.MonkeyPatch,
) -> tuple[Hidden, StreamBuffers]:
    """The pass of a bucket, everything that it launches written down."""
    device = device_of(decoder, recorder, MAX_TOKENS, patch)
    return launch(decoder, num_tokens, device, recorder), device.stream


def device_of(
    decoder: Decoder[Linear], recorder: Recorder, max_tokens: int, patch: pytest.MonkeyPatch
) -> KernelDevice:
    for name in ("add_norm", "rotate_and_store", "act_mul", "activate", "quantize_rows"):
        patch.setattr(kernel_step, name, getattr(recorder, name))
    ropes = {mixer.rope: mixer.rope.tables(64) for mixer in decoder.mixers if mixer.rope}
    inputs = StepInputs.make(max_tokens, 4, CPU)
    stream = StreamBuffers.make(max_tokens, HIDDEN, torch.float32, CPU)
    return KernelDevice(
        inputs=inputs,
        stream=stream,
        ranks=OneRank(stream.delta_TE),
        scratch=Scratch(torch.float32, CPU),
        kept=Scratch(torch.float32, CPU),
        products={Linear: recorder},
        experts=ExpertProduct(recorder, Choices(), inputs.counts, invariant=False, pdl=False),
        ropes=ropes,
        query_factors={},
        pdl=False,
        norms_apart=decoder.layers[-1].last[0] is not None,
    )


def launch(
    decoder: Decoder[Linear], num_tokens: int, device: KernelDevice, recorder: Recorder
) -> Hidden:
    max_tokens = len(device.stream.x_TE)
    table, slots = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(max_tokens, dtype=torch.int64)
    pages = LayerPages(torch.zeros(2, 2, 2, 16, 8))
    caches = [LayerCache(pages, table, slots) for _ in decoder.layers]
    step = KernelStep(device, num_tokens, caches, recorder)
    hidden = step.embed(decoder.embedding)
    decoder.forward(hidden, step)
    step.finish(hidden)
    return hidden
