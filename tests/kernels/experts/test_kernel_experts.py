"""A mixture's launches on a GPU give what the CPU gives, by whichever way rows meet experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Literal, TypeAlias

import pytest
import torch
from torch import Tensor

from services.compute.kernels.choices import Choices
from services.compute.kernels.experts.routing import NOWHERE, HeldExperts, Routing
from services.compute.kernels.rows.combine_experts import combine_experts
from services.compute.kernels.step.step_buffers import NUM_TOKENS
from services.compute.layers.cpu_linear import CpuLinears
from services.compute.layers.eager_experts import run_experts
from services.compute.layers.kernel_experts import ExpertProduct, ExpertRoom
from services.compute.layers.parts import Experts, GatedMLP
from services.compute.layers.products import InvariantProduct, ProductByRows
from services.compute.layers.scratch import Scratch
from services.compute.layers.weighted_layers import KernelLinears, Linear, LinearMaker
from services.compute.quantization.at_load import Quantization, quantized
from services.compute.quantization.packed import Packed, Weight
from tests.cases import crossed

NUM_EXPERTS, HIDDEN, MAX_TOKENS = 4, 256, 20  # rows of two groups of 128 may be codes
DTYPE = torch.bfloat16


Kind: TypeAlias = Quantization | Literal["fp8 by 128", "int4 or fp8"] | None


def in_codes(weight: Tensor, kind: Kind) -> Weight:
    if kind is None:
        return weight
    if kind != "fp8 by 128":
        return quantized(weight, kind)
    scales = torch.full((len(weight), weight.shape[1] // 128), 2.0**-10, device=weight.device)
    codes = (weight.float() * 2.0**10).to(torch.float8_e4m3fn)
    return Packed("fp8", codes, scales, inputs_8bit=True)


def mixture(
    make: LinearMaker,
    kind: Kind,
    device: torch.device,
    taken: Sequence[int] = range(NUM_EXPERTS),
    size: int = HIDDEN,
) -> Experts:
    """With all that there may be; of the same weights for any maker, those of experts taken."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(7))

    def maps(num_out: int, num_in: int) -> tuple:
        weights: list[Weight] = []
        for one in ("int4", "fp8") * (NUM_EXPERTS // 2):
            weight = (draw(num_out, num_in) * num_in**-0.5).to(device, DTYPE)
            weights.append(in_codes(weight, one if kind == "int4 or fp8" else kind))
        bias_XO = draw(NUM_EXPERTS, num_out).to(device, DTYPE)
        own = [weights[expert] for expert in taken]
        return make.experts(iter(own), len(own), bias_XO[[*taken]])

    shared = make(draw(size, size).to(device, DTYPE), None)
    return Experts(
        router=make.router(draw(NUM_EXPERTS, size).to(device), None),
        routing=Routing(NUM_EXPERTS, 2, "sigmoid"),
        gate_up=maps(2 * size, size),
        down=maps(size, size),
        gating="swiglu_oai",
        choice_bias_X=draw(NUM_EXPERTS).to(device),
        shared=GatedMLP(shared, shared),
        shared_gate=make.router(draw(1, size).to(device), None),
    )


KINDS: list[Kind] = [None, "fp8", "fp8 by 128", "int4"]
NUMS_OF_TOKENS = [1, 2, 4, MAX_TOKENS]
CASES = [
    *product([False], NUMS_OF_TOKENS, KINDS),
    *crossed([True], NUMS_OF_TOKENS, KINDS),  # which take one way, whatever the number of tokens
    *product([False], NUMS_OF_TOKENS[1::2], ["int4 or fp8"]),
    *product([False], NUMS_OF_TOKENS[::3], ["fp4"]),  # of one token there is nothing to order
]


@pytest.mark.parametrize(("invariant", "num_tokens", "kind"), CASES)
def test_experts_of_a_gpu_say_what_those_of_the_cpu_say(
    invariant: bool, num_tokens: int, kind: Kind, device: torch.device
) -> None:
    """In memory that the largest step has left, and in place of what the shared one has made."""
    x_TE = torch.randn(MAX_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    shared_TE = torch.randn(MAX_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(
        DTYPE
    )
    theirs = mixture(CpuLinears(DTYPE), kind, torch.device("cpu"))
    expected_TE = run_experts(x_TE[:num_tokens], theirs, shared_TE[:num_tokens])

    ours = mixture(KernelLinears(DTYPE, keeps_dense=False), kind, device)
    plain = InvariantProduct() if invariant else ProductByRows(None)
    counts = torch.zeros(NUM_TOKENS + 1, dtype=torch.int32, device=device)
    product = ExpertProduct(plain, Choices(), counts, invariant=invariant, pdl=False)
    scratch, kept = Scratch(DTYPE, device), Scratch(DTYPE, device)
    out_TE = shared_TE.to(device, copy=True)
    for count in (MAX_TOKENS, num_tokens):
        scratch.rewind()
        kept.rewind()
        out_TE.copy_(shared_TE)
        some_TE = out_TE[:count]
        weighted = product(
            x_TE[:count].to(device), ours, some_TE, ExpertRoom(some_TE), scratch, kept
        )
        if weighted is not None:
            combine_experts(weighted, some_TE)
    rounds_rows = (
        kind in ("fp8", "fp8 by 128") and num_tokens > 2 and not invariant
    )  # to 3 bits behind the first
    atol = 0.4 if rounds_rows else 0.15
    torch.testing.assert_close(out_TE[:num_tokens].cpu(), expected_TE, rtol=0.05, atol=atol)


SHARES = [([0, 1, 2], [[0, 1, NOWHERE, NOWHERE], [0, 1, 2, NOWHERE]]),
          ([2, 3], [[NOWHERE, NOWHERE, 0, 1], [NOWHERE, NOWHERE, NOWHERE, 1]])]  # fmt: skip
"""Experts of each of two ranks, and their slots: two have expert 2, and take turns."""


@pytest.mark.parametrize(
    ("num_tokens", "kind", "size"),
    [(1, None, 64), (2, "int4", 64), (2, "fp8", 64), (20, None, 64), (20, "fp8 by 128", 256)],
)
def test_what_ranks_with_some_experts_make_adds_up(
    num_tokens: int, kind: Kind, size: int, device: torch.device
) -> None:
    """And nobody reads what an expert elsewhere would have made."""
    x_TE = torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    theirs = mixture(CpuLinears(DTYPE), kind, torch.device("cpu"), size=size)
    expected_TE = run_experts(x_TE, replace(theirs, shared_gate=None), None)
    sum_TE = torch.zeros(num_tokens, size)
    for taken, slots in SHARES:
        held = HeldExperts(len(taken), torch.tensor(slots, dtype=torch.int32, device=device))
        ours = mixture(KernelLinears(DTYPE, keeps_dense=False), kind, device, taken, size)
        ours = replace(ours, held=held, shared_gate=None)
        counts = torch.full((NUM_TOKENS + 1,), num_tokens, dtype=torch.int32, device=device)
        product = ExpertProduct(ProductByRows(None), Choices(), counts, invariant=False, pdl=False)
        scratch, kept = Scratch(DTYPE, device), Scratch(DTYPE, device)
        for each in (scratch, kept):
            each.take(1, 1 << 18).fill_(torch.nan)
            each.rewind()
        out_TE = torch.empty(num_tokens, size, dtype=DTYPE, device=device)
        weighted = product(x_TE.to(device), ours, None, ExpertRoom(out_TE), scratch, kept)
        if weighted is not None:
            combine_experts(weighted, out_TE)
        sum_TE += out_TE.float().cpu()
    atol = 0.4 if kind == "fp8 by 128" else 0.15  # rows are rounded to 3 bits behind the first
    torch.testing.assert_close(sum_TE, expected_TE.float(), rtol=0.05, atol=atol)


def test_a_router_keeps_what_rounding_would_change() -> None:
    make = KernelLinears(DTYPE, keeps_dense=False)
    for weight in (torch.tensor([[1.0, 0.5]]), torch.tensor([[1.001, 0.5]])):
        router = make.router(weight, torch.ones(1, dtype=DTYPE))
        assert isinstance(router, Linear) and torch.equal(router.weight_OI.float(), weight)
        assert router.bias_O is not None and router.bias_O.dtype == router.weight_OI.dtype
