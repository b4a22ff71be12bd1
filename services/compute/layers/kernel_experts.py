"""A mixture of experts on a GPU: launches that depend on shapes alone, whatever rows choose.

Very few rows take three: the router's product and the choice, and two products that read the maps
of each row's experts. Many take five: rows are put in the order of experts, so that a tile of a
product has one expert's, and what becomes of them is added up by the norm behind; of one row, which
some maps take so as well, there is nothing to order. Where maps take codes of 8 bits, one or two
more launches make them.

Shape legend: T tokens, E hidden width, F inner width of an expert, X experts, K experts of a token,
R = T * K pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.compute.kernels.choices import Choices
from services.compute.kernels.experts.expert_matmul import expert_down, expert_gate_up
from services.compute.kernels.experts.expert_matmul_config import (
    FEW_PAIRS,
    ExpertConfig,
    ExpertStack,
    block_rows,
    expert_config,
    expert_options,
    way,
)
from services.compute.kernels.experts.expert_matvec import expert_down_rows, expert_gate_up_rows
from services.compute.kernels.experts.quantized_expert_config import (
    emits_codes,
    expert_row_form,
    quantized_block_rows,
    quantized_expert_options,
)
from services.compute.kernels.experts.quantized_expert_matmul import (
    quantized_down,
    quantized_gate_up,
)
from services.compute.kernels.experts.route import (
    MAX_ROWS,
    Counting,
    Logits,
    Router,
    route_few_rows,
    route_rows,
)
from services.compute.kernels.experts.router_logits import (
    MAX_LOGITS,
    num_shares,
    router_logits,
    takes,
)
from services.compute.kernels.experts.sort_experts import MIN_BLOCK_ROWS, ExpertOrder, sort_experts
from services.compute.kernels.experts.summed_expert_matmul import summed_expert_down
from services.compute.kernels.linear.quantized_matmul_config import fits_device
from services.compute.kernels.ranks.tree_sum import NUM_SEGMENTS
from services.compute.kernels.rows.combine_experts import SharedRows, WeightedRows
from services.compute.kernels.rows.quantized_rows import QuantizedRows, RowForm, quantize_rows
from services.compute.kernels.step.step_buffers import NUM_TOKENS
from services.compute.layers.parts import Experts, Gating
from services.compute.layers.products import Product
from services.compute.layers.scratch import Scratch
from services.compute.layers.weighted_layers import AnyLinear, Linear, QuantizedLinear


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The experts of each token, and the weights of what they make of it."""

    experts_TK: Tensor  # int32; of experts that are spread over ranks, slots
    weights_TK: Tensor  # float32


class ExpertRoom(NamedTuple):
    """Where a mixture leaves what it adds to the residual stream."""

    own_TE: Tensor
    pairs_RE: Tensor | None = None  # for rows of pairs that ranks add up; None: they are kept


class ExpertProduct:
    """How a device runs mixtures; one object for all layers."""

    def __init__(
        self,
        plain: Product[Linear],
        choices: Choices,
        step_counts: Tensor,
        *,
        invariant: bool,
        pdl: bool,
        num_segments: int = NUM_SEGMENTS,
    ) -> None:
        """`plain` makes the logits of routers; `step_counts` are `StepInputs`'; `invariant`: a
        row's result does not depend on the number of rows, nor, where its weights are numbers, on
        that of ranks, which have so many segments of an inner width each, or whole experts."""
        self._plain = plain
        self._choices = choices
        self._num_real = step_counts[NUM_TOKENS : NUM_TOKENS + 1]
        self._arrivals = torch.zeros(1, dtype=torch.int32, device=step_counts.device)
        self._one_token: dict[int, ExpertOrder] = {}  # by its number of experts
        self._invariant = invariant
        self._num_segments = num_segments
        self._takes_quantized = not invariant and fits_device(step_counts.device)
        self._pdl = pdl

    def __call__(
        self,
        x_TE: Tensor,
        experts: Experts[AnyLinear],
        shared_TE: Tensor | None,
        out: ExpertRoom,
        scratch: Scratch,
        kept: Scratch,
    ) -> WeightedRows | None:
        """As `StepContext.experts` says; the room may be the memory of `shared_TE`. What is
        returned is not yet added up into it, and lies there and in `kept`."""
        gate_up, _ = _stacks(experts)
        by_row = way(len(x_TE), gate_up, invariant=self._invariant) == "row"
        top_k, order = experts.routing.top_k, None
        if len(x_TE) == 1 and not by_row and experts.held is None:
            order = self._order_of_one(top_k, experts.num_held, x_TE.device)
            experts_TK = order.tiles_3N[:1]
        else:
            experts_TK = scratch.take_as(torch.int32, len(x_TE), top_k)
        routes = self._routes(
            x_TE, experts, experts_TK, scratch, kept, all_weights=out.pairs_RE is not None
        )
        shared = self._shared(x_TE, experts, shared_TE, scratch, kept)
        if experts.scales_input:
            scaled_TE = scratch.take(*x_TE.shape)
            torch.mul(x_TE, routes.weights_TK, out=scaled_TE)
            routes.weights_TK.ne_(0.0)  # 1 of those that are here
            x_TE = scaled_TE
        if by_row:
            self._by_row(x_TE, experts, routes, shared, out.own_TE, scratch)
            return None
        rows_RE = out.pairs_RE
        is_spread = experts.held is not None
        if rows_RE is None:
            rows_RE = kept.take(routes.experts_TK.numel(), x_TE.shape[1])
        elif is_spread:
            rows_RE.zero_()  # those of experts that are elsewhere are not written
            is_spread = False
        self._by_tile(x_TE, experts, routes, order, scratch, rows_RE)
        return WeightedRows(rows_RE, routes.weights_TK, shared, is_spread)

    def _routes(
        self,
        x_TE: Tensor,
        experts: Experts[AnyLinear],
        experts_TK: Tensor,
        scratch: Scratch,
        kept: Scratch,
        *,
        all_weights: bool,
    ) -> Routes:
        """`all_weights`: those of experts that are elsewhere are not zero."""
        num_tokens, routing, bias_X = len(x_TE), experts.routing, experts.choice_bias_X
        weights_TK = kept.take_as(torch.float32, num_tokens, routing.top_k)
        routes = routing, bias_X, weights_TK, experts_TK
        tokens_X = experts.tokens_X
        counting = None if tokens_X is None else Counting(tokens_X, self._num_real)
        linear = _plain(experts.router)
        if not self._invariant and num_tokens <= MAX_ROWS:
            logits_TX = scratch.take_as(torch.float32, num_tokens, routing.num_experts)
            router = Router(linear.weight_OI, linear.bias_O, logits_TX, self._arrivals)
            route_few_rows(
                x_TE, router, *routes, counting=counting, held=experts.held, pdl=self._pdl
            )
        else:
            logits = self._router_logits(x_TE, linear, scratch)
            route_rows(logits, *routes, counting=counting, held=experts.held, pdl=self._pdl)
            if all_weights and experts.held is not None:
                numbers_TK = scratch.take_as(torch.int32, num_tokens, routing.top_k)
                route_rows(logits, routing, bias_X, weights_TK, numbers_TK, pdl=self._pdl)
        return Routes(experts_TK, weights_TK)

    def _router_logits(self, x_TE: Tensor, linear: Linear, scratch: Scratch) -> Logits:
        num_tokens, width = x_TE.shape
        if self._invariant or linear.weight_OI.dtype != x_TE.dtype:
            logits_TX = scratch.take_as(torch.float32, num_tokens, linear.num_out)
            self._logits(x_TE, linear, scratch, logits_TX)
            return Logits(logits_TX[None])
        num_parts, num_experts = num_shares(width), linear.num_out
        # as many for more rows than have parts, so that no smaller step takes more
        num_logits = max(num_tokens * num_experts, num_parts * MAX_LOGITS)
        memory = scratch.take_as(torch.float32, 1, num_logits).view(-1)
        if not takes(num_tokens, num_experts):
            logits_TX = memory[: num_tokens * num_experts].view(num_tokens, num_experts)
            self._plain(x_TE, linear, logits_TX)
            return Logits(logits_TX[None])
        parts_PTX = memory[: num_parts * num_tokens * num_experts]
        parts_PTX = parts_PTX.view(num_parts, num_tokens, num_experts)
        router_logits(x_TE, linear.weight_OI, parts_PTX, pdl=self._pdl)
        return Logits(parts_PTX, linear.bias_O)

    def _shared(
        self,
        x_TE: Tensor,
        experts: Experts[AnyLinear],
        shared_TE: Tensor | None,
        scratch: Scratch,
        kept: Scratch,
    ) -> SharedRows | None:
        if shared_TE is None:
            return None
        if experts.shared_gate is None:
            return SharedRows(shared_TE)
        logits_T1 = kept.take_as(torch.float32, len(x_TE), 1)
        self._logits(x_TE, experts.shared_gate, scratch, logits_T1)
        return SharedRows(shared_TE, logits_T1[:, 0])

    def _logits(self, x_TE: Tensor, router: AnyLinear, scratch: Scratch, logits_TX: Tensor) -> None:
        linear = _plain(router)
        if linear.weight_OI.dtype != x_TE.dtype:  # has more bits than the model's
            x_TE = scratch.take_as(linear.weight_OI.dtype, *x_TE.shape).copy_(x_TE)
        self._plain(x_TE, linear, logits_TX)

    def _by_row(
        self,
        x_TE: Tensor,
        experts: Experts[AnyLinear],
        routes: Routes,
        shared: SharedRows | None,
        out_TE: Tensor,
        scratch: Scratch,
    ) -> None:
        gate_up, down = _stacks(experts)
        experts_TK, weights_TK = routes.experts_TK, routes.weights_TK
        inner_RF = scratch.take(experts_TK.numel(), down.num_in)
        how: Any = {"is_spread": experts.held is not None, "pdl": self._pdl}
        expert_gate_up_rows(x_TE, gate_up, experts_TK, inner_RF, experts.gating, **how)
        expert_down_rows(inner_RF, down, experts_TK, weights_TK, shared, out_TE, **how)

    def _by_tile(
        self,
        x_TE: Tensor,
        experts: Experts[AnyLinear],
        routes: Routes,
        order: ExpertOrder | None,
        scratch: Scratch,
        rows_RE: Tensor,
    ) -> None:
        """Write rows of pairs."""
        gate_up, down = _stacks(experts)
        num_experts, num_pairs = experts.routing.num_experts, routes.experts_TK.numel()
        num_here = -(-num_pairs * experts.num_held // num_experts)  # about as many, of all pairs
        value = self._codes(x_TE, gate_up, scratch)
        if isinstance(value, QuantizedRows):
            rows = quantized_block_rows(num_pairs, num_experts)
        else:
            rows = block_rows(num_here, gate_up, x_TE.dtype, invariant=self._invariant)
        if order is None or self._choices.is_asking:
            order = self._ordered(routes, experts, rows, scratch)
        order = replace(order, block_rows=rows)
        inner = self._inner(value, gate_up, down, order, experts.gating, scratch)
        if self._invariant and isinstance(inner, Tensor) and isinstance(down.weight, Tensor):
            num_segments = self._num_segments if experts.held is None else NUM_SEGMENTS
            summed_expert_down(inner, down, order, rows_RE, num_segments)
        else:
            self._down(inner, down, order, rows_RE)

    def _row_form(self, stack: ExpertStack) -> RowForm | None:
        """How rows are quantized for these experts; None: not at all."""
        return expert_row_form(stack.weight) if self._takes_quantized else None

    def _codes(self, x_TI: Tensor, stack: ExpertStack, scratch: Scratch) -> Tensor | QuantizedRows:
        """The rows as these experts take them."""
        form = self._row_form(stack)
        if form is None:
            return x_TI
        rows = _room(form, (len(x_TI), stack.num_in), scratch)
        quantize_rows(x_TI, rows, pdl=self._pdl)
        return rows

    def _order_of_one(self, top_k: int, num_experts: int, device: torch.device) -> ExpertOrder:
        """One token's pairs are a tile each, in the order in which it chooses their experts."""
        if top_k not in self._one_token:
            self._one_token[top_k] = ExpertOrder.of_one_token(top_k, num_experts, device)
        return self._one_token[top_k]

    def _ordered(
        self, routes: Routes, experts: Experts[AnyLinear], rows: int, scratch: Scratch
    ) -> ExpertOrder:
        """By expert, in tiles of so many rows."""
        num_pairs, num_experts = routes.experts_TK.numel(), experts.num_held
        if self._choices.is_asking:
            # launches that are noted run when memory holds something else, on random rows at best
            expert_R = torch.arange(num_pairs, dtype=torch.int32, device=routes.experts_TK.device)
            order = ExpertOrder.empty(num_pairs, num_experts, rows, expert_R.device)
            sort_experts(expert_R % experts.routing.num_experts, order)
            return order
        # of the smallest tiles, so that no smaller number of pairs takes more
        num_bytes = ExpertOrder.num_bytes(num_pairs, num_experts, MIN_BLOCK_ROWS)
        memory = scratch.take_bytes(num_bytes)
        order = ExpertOrder.within(memory, num_pairs, num_experts, rows)
        sort_experts(routes.experts_TK, order, pdl=self._pdl)
        return order

    def _inner(
        self,
        x: Tensor | QuantizedRows,
        gate_up: ExpertStack,
        down: ExpertStack,
        order: ExpertOrder,
        gating: Gating,
        scratch: Scratch,
    ) -> Tensor | QuantizedRows:
        """Gated rows of pairs, as the second product takes them."""
        size = order.num_pairs, down.num_in
        if not isinstance(x, QuantizedRows):
            inner_RF = scratch.take(*size)
            run = partial(expert_gate_up, x, gate_up, order, inner_RF, gating, pdl=self._pdl)
            self._launch(gate_up, order, x.dtype, run, gated=True)
            return self._codes(inner_RF, down, scratch)
        form, rows = self._row_form(down), order.block_rows
        emits = form is not None and emits_codes(form, rows)
        out = _room(form, size, scratch) if form is not None and emits else scratch.take(*size)
        self._choices.launch(
            quantized_expert_options(rows, x.form, gate_up, gated=True, emits=emits),
            partial(quantized_gate_up, x, gate_up, order, out, gating, pdl=self._pdl),
        )
        return out if isinstance(out, QuantizedRows) else self._codes(out, down, scratch)

    def _down(
        self, x: Tensor | QuantizedRows, stack: ExpertStack, order: ExpertOrder, out_RE: Tensor
    ) -> None:
        rest = stack, order, out_RE
        if isinstance(x, QuantizedRows):
            options = quantized_expert_options(order.block_rows, x.form, stack, gated=False)
            self._choices.launch(options, partial(quantized_down, x, *rest, pdl=self._pdl))
        else:
            run = partial(expert_down, x, *rest, pdl=self._pdl)
            self._launch(stack, order, x.dtype, run, gated=False)

    def _launch(
        self,
        stack: ExpertStack,
        order: ExpertOrder,
        dtype: torch.dtype,
        run: Callable[[ExpertConfig], object],
        *,
        gated: bool,
    ) -> None:
        if self._invariant:
            run(expert_config(order.block_rows, stack, dtype, gated=gated))
        else:
            few = order.num_pairs <= FEW_PAIRS
            options = expert_options(order.block_rows, stack, dtype, gated=gated, few=few)
            self._choices.launch(options, run)


def _room(form: RowForm, size: tuple[int, int], scratch: Scratch) -> QuantizedRows:
    memory = scratch.take_bytes(QuantizedRows.num_bytes(form, *size))
    return QuantizedRows.within(memory, form, *size)


def _plain(router: AnyLinear) -> Linear:
    if not isinstance(router, Linear):
        raise TypeError("routers are numbers here")
    return router


def _stacks(experts: Experts[AnyLinear]) -> tuple[ExpertStack, ExpertStack]:
    """Gates and ups of all experts, and downs."""
    (gate_up,), (down,) = experts.gate_up, experts.down
    count = experts.num_held
    return _stack(gate_up, count), _stack(down, count)


def _stack(linear: AnyLinear, num_experts: int) -> ExpertStack:
    weight = linear.weight if isinstance(linear, QuantizedLinear) else linear.weight_OI
    bias_XO = None if linear.bias_O is None else linear.bias_O.view(num_experts, -1)
    return ExpertStack(weight, num_experts, bias_XO)
