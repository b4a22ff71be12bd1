"""The launches of a mixture of experts, at 1 to 2,048 rows.

Rows go to experts drawn at random, evenly. Weights are cold: a stack is larger than the cache, and
the calls of a graph take other experts in turn. Each product is compared with float64 first; a
layer is all launches, as a step makes them.

Predicted on an H200 in microseconds, gate/up and down together: the bytes of the distinct experts
at 4.5 TB/s or the operations at 650 TFLOP/s, whichever takes longer, without launches:

                          T=1    2    4    16    64    256   2048
    Qwen3-30B-A3B bf16     17   33   61   173   264    268    268
    the same, FP8           9   17   32    89   136    138    238
    gpt-oss-20B MXFP4      12   23   41    88   100    100    627
    DeepSeek-V2-Lite       23   44   80   195   246    246    327
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from services.compute.kernels.experts.expert_matmul import expert_down, expert_gate_up
from services.compute.kernels.experts.expert_matmul_config import (
    FEW_PAIRS,
    ExpertConfig,
    ExpertStack,
    block_rows,
    expert_config,
    has_halves,
)
from services.compute.kernels.experts.expert_matvec import (
    ExpertRowConfig,
    expert_down_rows,
    expert_gate_up_rows,
    expert_row_config,
)
from services.compute.kernels.experts.route import (
    MAX_ROWS,
    Counting,
    Logits,
    Router,
    route_few_rows,
    route_rows,
)
from services.compute.kernels.experts.routing import Routing
from services.compute.kernels.experts.sort_experts import ExpertOrder, sort_experts
from services.compute.kernels.rows.activations import gated_reference
from services.compute.kernels.rows.combine_experts import WeightedRows, combine_experts
from services.compute.layers.parts import Gating
from services.compute.quantization.packed import Kind, Packed

TOKENS = (1, 2, 4, 16, 64, 256, 2048)
ROUTINGS = 6
"""Drawn for each number of rows, and taken in turn."""

COMPARED = 8
"""Pairs of a product."""

MAX_ROW_TOKENS = 4
"""Up to which a layer is timed by row, too."""

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Mixture:
    """The sizes of a layer's experts, and what their weights are."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    top_k: int
    kind: Kind | None = None
    group: int = 0
    gating: Gating = "silu"
    biases: bool = False

    @cached_property
    def gate_up(self) -> ExpertStack:
        return self._stack(2 * self.inner, self.hidden)

    @cached_property
    def router(self) -> Router:
        weight = torch.randn(self.num_experts, self.hidden, device="cuda", dtype=DTYPE)
        return Router(
            weight.mul_(self.hidden**-0.5),
            None,
            torch.empty(MAX_ROWS, self.num_experts, device="cuda"),
            torch.zeros(1, device="cuda", dtype=torch.int32),
        )

    @cached_property
    def down(self) -> ExpertStack:
        return self._stack(self.hidden, self.inner)

    def _stack(self, num_out: int, num_in: int) -> ExpertStack:
        rows, scale = self.num_experts * num_out, num_in**-0.5
        bias = None
        if self.biases:
            bias = torch.randn(self.num_experts, num_out, device="cuda", dtype=DTYPE)
        if self.kind is None:
            weight = torch.randn(rows, num_in, device="cuda", dtype=DTYPE).mul_(scale)
            return ExpertStack(weight, self.num_experts, bias)
        in_halves = self.kind in ("int4", "fp4")
        num_bytes = num_in // 2 if in_halves else num_in
        most = 256 if in_halves else 120  # no code of FP8 that is no number
        codes = torch.randint(0, most, (rows, num_bytes), device="cuda", dtype=torch.uint8)
        dtypes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
        power = torch.randint(-8, -4, (rows, num_in // (self.group or num_in)), device="cuda")
        packed = Packed(
            self.kind,
            codes.view(dtypes.get(self.kind, torch.uint8)),
            power.float().exp2().to(DTYPE),
        )
        weight = packed.with_adjacent_rows().with_halfwords()
        return ExpertStack(weight, self.num_experts, bias)


MIXTURES = (
    Mixture("Qwen3-30B-A3B bf16", 2048, 768, 128, 8),
    Mixture("Qwen3-30B-A3B FP8 by 128", 2048, 768, 128, 8, "fp8", 128),
    Mixture("gpt-oss-20B MXFP4", 2880, 2880, 32, 4, "fp4", 32, "swiglu_oai", biases=True),
    Mixture("DeepSeek-V2-Lite bf16", 2048, 1408, 64, 6),
)


class Rows:
    """Rows of tokens, a choice of experts for them, and room for all results."""

    def __init__(self, mixture: Mixture, num_tokens: int, block: int) -> None:
        values = partial(torch.empty, device="cuda", dtype=DTYPE)
        pairs, hidden = num_tokens * mixture.top_k, mixture.hidden
        self.mixture = mixture
        self.x_TE = torch.randn(num_tokens, hidden, device="cuda", dtype=DTYPE)
        self.logits_TX = torch.randn(num_tokens, mixture.num_experts, device="cuda")
        self.weights_TK = values(num_tokens, mixture.top_k, dtype=torch.float32)
        self.experts_TK = values(num_tokens, mixture.top_k, dtype=torch.int32)
        self.inner_RF = values(pairs, mixture.inner)
        self.rows_RE = values(pairs, hidden)
        self.out_TE = values(num_tokens, hidden)
        self.counting = Counting(
            torch.zeros(mixture.num_experts, device="cuda", dtype=torch.int64),
            torch.tensor([num_tokens], device="cuda", dtype=torch.int32),
        )
        self.order = ExpertOrder.empty(pairs, mixture.num_experts, block, self.x_TE.device)
        self.route()
        self.sort()

    def route(self, *, pdl: bool = False, counts: bool = True) -> None:
        routing = Routing(self.mixture.num_experts, self.mixture.top_k)
        routes = self.weights_TK, self.experts_TK
        counting = self.counting if counts else None
        route_rows(Logits(self.logits_TX[None]), routing, None, *routes, counting=counting, pdl=pdl)

    def route_few(self, *, pdl: bool = False) -> None:
        routing = Routing(self.mixture.num_experts, self.mixture.top_k)
        route_few_rows(
            self.x_TE, self.mixture.router, routing, None, self.weights_TK, self.experts_TK, pdl=pdl
        )

    def sort(self, *, pdl: bool = False) -> None:
        sort_experts(self.experts_TK, self.order, pdl=pdl)

    def gate_up(self, config: ExpertConfig, *, pdl: bool = False) -> None:
        mixture = self.mixture
        expert_gate_up(
            self.x_TE, mixture.gate_up, self.order, self.inner_RF, mixture.gating, config, pdl=pdl
        )

    def down(self, config: ExpertConfig, *, pdl: bool = False) -> None:
        expert_down(self.inner_RF, self.mixture.down, self.order, self.rows_RE, config, pdl=pdl)

    def combine(self, *, pdl: bool = False) -> None:
        combine_experts(WeightedRows(self.rows_RE, self.weights_TK), self.out_TE, pdl=pdl)

    def gate_up_rows(self, config: ExpertRowConfig | None = None, *, pdl: bool = False) -> None:
        mixture, experts = self.mixture, self.experts_TK
        expert_gate_up_rows(
            self.x_TE, mixture.gate_up, experts, self.inner_RF, mixture.gating, config, pdl=pdl
        )

    def down_rows(self, config: ExpertRowConfig | None = None, *, pdl: bool = False) -> None:
        expert_down_rows(
            self.inner_RF, self.mixture.down, self.experts_TK, self.weights_TK, None, self.out_TE,
            config, pdl=pdl,
        )  # fmt: skip

    def layer(self, gate_up: ExpertConfig, down: ExpertConfig, *, pdl: bool) -> None:
        """All launches of a tiled layer."""
        self.route(pdl=pdl)
        self.sort(pdl=pdl)
        self.gate_up(gate_up, pdl=pdl)
        self.down(down, pdl=pdl)
        self.combine(pdl=pdl)

    def layer_by_row(self, *, pdl: bool) -> None:
        """All launches of a layer of very few rows, with the router's product."""
        self.route_few(pdl=pdl)
        self.gate_up_rows(pdl=pdl)
        self.down_rows(pdl=pdl)

    @property
    def compared_R(self) -> Tensor:
        """The first pairs in order."""
        return self.order.order_R[:COMPARED].long()

    def gate_up_error(self) -> float:
        """Of `gate_up` in units of the outputs' root mean square, which rounding makes 0.01 of."""
        pair_R = self.compared_R
        rows_RI = self.x_TE[pair_R // self.mixture.top_k]
        both = _products(rows_RI, self.mixture.gate_up, self.experts_TK.flatten()[pair_R])
        expected = both.new_empty(len(both), self.mixture.inner)
        gated_reference(both, expected, self.mixture.gating)
        return _error(self.inner_RF[:COMPARED], expected)

    def down_error(self) -> float:
        """The same of `down`."""
        pair_R = self.compared_R
        rows_RI, expert_R = self.inner_RF[:COMPARED], self.experts_TK.flatten()[pair_R]
        return _error(self.rows_RE[pair_R], _products(rows_RI, self.mixture.down, expert_R))

    def layer_error(self) -> float:
        """The same of the first row of a layer."""
        mixture, expert_K = self.mixture, self.experts_TK[0]
        rows_KE = self.x_TE[:1].expand(mixture.top_k, -1)
        both = _products(rows_KE, mixture.gate_up, expert_K)
        inner = both.new_empty(len(both), mixture.inner)
        gated_reference(both, inner, mixture.gating)
        rows = _products(inner, mixture.down, expert_K)
        return _error(self.out_TE[:1], self.weights_TK[:1].double() @ rows)


def _products(rows_RI: Tensor, stack: ExpertStack, expert_R: Tensor) -> Tensor:
    """Of rows with the maps of their experts, in float64."""
    found = []
    for row_I, expert in zip(rows_RI.double(), expert_R.tolist(), strict=True):
        its = slice(expert * stack.num_out, (expert + 1) * stack.num_out)
        weight = stack.weight
        part = weight.rows(its).dense(torch.float64) if isinstance(weight, Packed) else weight[its]
        out_O = part.double() @ row_I
        found.append(out_O if stack.bias_XO is None else out_O + stack.bias_XO[expert].double())
    return torch.stack(found)


def _error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).abs().max() / expected.square().mean().sqrt())


@dataclass(frozen=True, slots=True)
class Work:
    """What a product must read and compute."""

    num_bytes: float
    flops: float

    @staticmethod
    def of(rows: Rows, stacks: list[ExpertStack]) -> Work:
        distinct, num_bytes, flops = rows.experts_TK.unique().numel(), 0.0, 0.0
        for stack in stacks:
            weight, num_pairs = stack.weight, rows.experts_TK.numel()
            all_bytes = weight.num_bytes if isinstance(weight, Packed) else weight.nbytes
            num_bytes += all_bytes * distinct / stack.num_experts
            flops += 2.0 * num_pairs * stack.num_out * stack.num_in
        return Work(num_bytes, flops)


def case(name: str, runs: list[Callable[[], None]], rows: Rows, stacks: list[ExpertStack]) -> Case:
    work = Work.of(rows, stacks)
    return Case(name, runs, work.num_bytes, work.flops)


def cases() -> Iterator[Case]:
    for mixture in MIXTURES:
        for num_tokens in TOKENS:
            yield from _launches(mixture, num_tokens)
        for part in ("gate_up", "down", "router"):  # room for the next one's
            mixture.__dict__.pop(part, None)
        torch.cuda.empty_cache()
    many = Mixture("128 experts", 128, 128, 128, 8)
    for num_tokens in (1, 4):
        rows = Rows(MIXTURES[0], num_tokens, 16)
        yield case(f"router and route 128 T={num_tokens}", [rows.route_few], rows, [])
    for num_tokens in (1, 64, 2048, 8192):
        rows = Rows(many, num_tokens, 128)
        nothing: list[ExpertStack] = []
        for counts in (False, True):
            name = f"route{' and count' * counts} 128 T={num_tokens}"
            yield case(name, [partial(rows.route, counts=counts)], rows, nothing)
        yield case(f"sort 128 T={num_tokens}", [rows.sort], rows, nothing)


def _launches(mixture: Mixture, num_tokens: int) -> Iterator[Case]:
    block = block_rows(num_tokens * mixture.top_k, mixture.gate_up, DTYPE)
    drawn = [Rows(mixture, num_tokens, block) for _ in range(ROUTINGS)]
    first, gate_up, down = drawn[0], mixture.gate_up, mixture.down
    few = num_tokens * mixture.top_k <= FEW_PAIRS
    gate_config = expert_config(block, gate_up, DTYPE, gated=True, few=few)
    down_config = expert_config(block, down, DTYPE, gated=False, few=few)
    first.layer(gate_config, down_config, pdl=True)
    errors = f"{first.gate_up_error():.4f} {first.down_error():.4f} {first.layer_error():.4f}"
    print(f"{mixture.name} T={num_tokens}: errors {errors}; {gate_config}; {down_config}")
    at = f"{mixture.name} T={num_tokens}"
    both = [gate_up, down]
    yield case(f"{at} gate/up", [partial(r.gate_up, gate_config) for r in drawn], first, [gate_up])
    yield case(f"{at} down", [partial(r.down, down_config) for r in drawn], first, [down])
    yield case(f"{at} combine", [r.combine for r in drawn], first, [])
    for pdl in (False, True):
        runs = [partial(r.layer, gate_config, down_config, pdl=pdl) for r in drawn]
        yield case(f"{at} layer{', pdl' * pdl}", runs, first, both)
    if num_tokens <= MAX_ROW_TOKENS and not has_halves(gate_up):
        first.layer_by_row(pdl=True)
        configs = [expert_row_config(s, gated=s is gate_up) for s in both]
        print(f"by row: error {first.layer_error():.4f}; {configs}")
        yield case(f"{at} gate/up by row", [r.gate_up_rows for r in drawn], first, [gate_up])
        yield case(f"{at} down by row", [r.down_rows for r in drawn], first, [down])
        for pdl in (False, True):
            runs = [partial(r.layer_by_row, pdl=pdl) for r in drawn]
            yield case(f"{at} layer by row{', pdl' * pdl}", runs, first, both)
