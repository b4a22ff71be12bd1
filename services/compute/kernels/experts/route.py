"""Which experts rows go to, in one launch; routing.py has the rule, and its plain reference.

A row of padding goes where the first row goes, so that no expert is read for it alone.

A program has a row, and adds up the parts that its logits come in. A score and its expert's number
are one integer, of which the largest is the choice: the highest score and, of equal ones, the
lowest number.

Of experts that are spread over ranks it writes the slots of those that are here. The weights of the
others are zero, so that nobody reads what they have not made.

With very few rows the router's product is in the launch, too: a program makes the logits of an
expert, and whichever ends last chooses. A launch less, where each takes longer than its work.

Shape legend: P parts, T rows, E hidden width, X experts, G groups of them, S experts of a group,
K experts of a row, C rows of a table of slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.experts.routing import NOWHERE as _NOWHERE
from services.compute.kernels.experts.routing import SMALLEST_SUM as _SMALLEST_SUM
from services.compute.kernels.experts.routing import HeldExperts, Routing
from services.compute.kernels.launch import dependent_launch

WARP_INPUTS = 4096
"""Of a warp, for logits."""

MAX_ROWS = 4
"""Of a launch with the router's product."""

SMALLEST_SUM = tl.constexpr(_SMALLEST_SUM)
NOWHERE = tl.constexpr(_NOWHERE)
_LOWEST = tl.constexpr(-(1 << 63))  # below all scores
_FAR_BELOW = tl.constexpr(-3e38)  # of logits: those of no expert have no share
_NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)  # above all, as a sort has it


class Counting(NamedTuple):
    """Where to add how many rows each expert gets, and how many rows are no padding."""

    tokens_X: Tensor  # int64
    num_real: Tensor  # int32, of one number


@triton.jit
def _order_of(x):
    """Integers in the order of float32s; what is no number is above all."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, ordered, _NOT_A_NUMBER)


@triton.jit
def _float_of(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _keys(scores, numbers, inside):
    """One integer for a score and its number; lower numbers are larger."""
    key = (_order_of(scores).to(tl.int64) << 32) | (0x7FFFFFFF - numbers).to(tl.int64)
    return tl.where(inside, key, _LOWEST)


@triton.jit
def _number(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _score(key):
    return _float_of((key >> 32).to(tl.int32))


@triton.jit
def _group_scores(key_GS, TOP2: tl.constexpr):
    """The best of a group, or the sum of the best two."""
    best_G = tl.max(key_GS, axis=1)
    score_G = _score(best_G)
    if TOP2:
        others_GS = tl.where(key_GS == best_G[:, None], _LOWEST, key_GS)
        score_G += _score(tl.max(others_GS, axis=1))
    return score_G


@triton.jit
def _share(best, logit_GS, is_left_GS, TOLERANCE: tl.constexpr):
    """The best logit's share of the softmax of those that are left and near it."""
    is_far_GS = best - logit_GS > TOLERANCE * tl.maximum(tl.abs(logit_GS), best)
    return 1.0 / tl.sum(tl.where(is_left_GS & (is_far_GS == 0), tl.exp(logit_GS - best), 0.0))


@triton.jit
def _choose(
    row, logit_ptr, part_stride, logit_bias_ptr, bias_ptr, weight_ptr, expert_ptr, token_ptr,
    num_real, slot_ptr, C: tl.constexpr, X: tl.constexpr, PARTS: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Write the choice of a row, and count it."""
    is_real = row < num_real
    source = tl.where(is_real, row, 0)
    SCORES: tl.constexpr = RULE[0]
    K: tl.constexpr = RULE[1]
    G: tl.constexpr = RULE[4]
    TOP_GROUPS: tl.constexpr = RULE[5]
    S: tl.constexpr = X // G
    g, s = tl.arange(0, RULE[7]), tl.arange(0, RULE[8])
    k = tl.arange(0, RULE[9])
    x_GS = g[:, None] * S + s[None, :]
    inside_GS = (g < G)[:, None] & (s < S)[None, :]
    OUTSIDE: tl.constexpr = _FAR_BELOW if SCORES == "softmax" else 0.0
    logit_GS = tl.zeros(x_GS.shape, dtype=tl.float32)
    for part in tl.static_range(PARTS):
        # past the first-level cache, which knows nothing of other programs' writes
        place = logit_ptr + part * part_stride + source * X
        logit_GS += tl.load(place + x_GS, mask=inside_GS, other=0.0, cache_modifier=".cg")
    if logit_bias_ptr is not None:
        logit_GS += tl.load(logit_bias_ptr + x_GS, mask=inside_GS, other=0.0).to(tl.float32)
    logit_GS = tl.where(inside_GS, logit_GS, OUTSIDE)
    if SCORES == "softmax":
        exp_GS = tl.exp(logit_GS - _float_of(tl.max(_order_of(logit_GS))))
        score_GS = exp_GS / tl.sum(exp_GS)
    elif SCORES == "sigmoid":
        score_GS = 1.0 / (1.0 + tl.exp(-logit_GS))
    else:
        tl.static_assert(SCORES == "sparsemixer")
        score_GS = logit_GS
    choice_GS = score_GS
    if bias_ptr is not None:
        choice_GS += tl.load(bias_ptr + x_GS, mask=inside_GS, other=0.0)
    key_GS = _keys(choice_GS, x_GS, inside_GS)
    if G > 1:
        group_G = _keys(_group_scores(key_GS, RULE[6]), g, g < G)
        is_top_G = g < 0
        for _ in tl.static_range(TOP_GROUPS):
            is_best_G = group_G == tl.max(group_G)
            is_top_G |= is_best_G
            group_G = tl.where(is_best_G, _LOWEST, group_G)
        key_GS = _keys(tl.where(is_top_G[:, None], choice_GS, float("-inf")), x_GS, inside_GS)

    weight_K = tl.zeros(k.shape, dtype=tl.float32)
    expert_K = tl.zeros(k.shape, dtype=tl.int32)
    for rank in tl.static_range(K):
        best = tl.max(key_GS)
        is_best_GS = key_GS == best
        if SCORES == "sparsemixer":
            weight = _share(_score(best), logit_GS, key_GS != _LOWEST, RULE[10])
        else:
            weight = tl.sum(tl.where(is_best_GS, score_GS, 0.0))
        weight_K = tl.where(k == rank, weight, weight_K)
        expert_K = tl.where(k == rank, _number(best), expert_K)
        key_GS = tl.where(is_best_GS, _LOWEST, key_GS)
    if RULE[2]:
        weight_K /= tl.maximum(tl.sum(weight_K), SMALLEST_SUM)
    if token_ptr is not None:
        tl.atomic_add(token_ptr + expert_K, 1, mask=(k < K) & is_real, sem="relaxed")
    if slot_ptr is not None:
        expert_K = tl.load(slot_ptr + source % C * X + expert_K)
        weight_K = tl.where(expert_K == NOWHERE, 0.0, weight_K)
    tl.store(weight_ptr + row * K + k, weight_K * RULE[3], mask=k < K)
    tl.store(expert_ptr + row * K + k, expert_K, mask=k < K)


@triton.jit
def _num_real(num_real_ptr):
    """Rows that are no padding: all, if nothing says how many."""
    num_real = 0x7FFFFFFF
    if num_real_ptr is not None:
        num_real = tl.load(num_real_ptr)
    return num_real


@triton.jit(do_not_specialize=["part_stride"])
def _route_kernel(
    logit_ptr, part_stride, logit_bias_ptr, bias_ptr, weight_ptr, expert_ptr, token_ptr,
    num_real_ptr, slot_ptr, C: tl.constexpr, X: tl.constexpr, PARTS: tl.constexpr,
    RULE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    num_real = _num_real(num_real_ptr)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _choose(
        tl.program_id(0), logit_ptr, part_stride, logit_bias_ptr, bias_ptr, weight_ptr, expert_ptr,
        token_ptr, num_real, slot_ptr, C, X, PARTS, RULE,
    )  # fmt: skip


@triton.jit
def _router_kernel(
    x_ptr, w_ptr, w_bias_ptr, logit_ptr, arrivals_ptr, bias_ptr, weight_ptr, expert_ptr, token_ptr,
    num_real_ptr, slot_ptr,
    C: tl.constexpr, T: tl.constexpr, E: tl.constexpr, X: tl.constexpr, BLOCK_E: tl.constexpr,
    RULE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each expert's logits; the last to end chooses, for all rows."""
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    w = tl.load(w_ptr + expert * E + e, mask=e < E, other=0.0)
    num_real = _num_real(num_real_ptr)
    w_bias = 0.0
    if w_bias_ptr is not None:
        w_bias = tl.load(w_bias_ptr + expert).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for row in tl.static_range(T):
        x = tl.load(x_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32)
        tl.store(logit_ptr + row * X + expert, tl.sum(w.to(tl.float32) * x) + w_bias)
    # All threads' logits are written before the one thread that says so releases them; the program
    # that finds itself last acquires everybody's.
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == X - 1:
        tl.store(arrivals_ptr, 0)
        for waiting in range(T):
            _choose(
                waiting, logit_ptr, 0, None, bias_ptr, weight_ptr, expert_ptr, token_ptr,
                num_real, slot_ptr, C, X, 1, RULE,
            )  # fmt: skip


class _Rule(NamedTuple):
    """A constant of kernels."""

    scores: str
    top_k: int
    renormalised: bool
    scale: float
    num_groups: int
    top_groups: int
    top2: bool
    block_groups: int
    block_group: int
    block_top_k: int
    tolerance: float

    @staticmethod
    def of(routing: Routing) -> _Rule:
        return _Rule(
            routing.scores,
            routing.top_k,
            routing.renormalised,
            routing.scale,
            routing.num_groups,
            routing.top_groups,
            routing.group_by == "top2",
            triton.next_power_of_2(routing.num_groups),
            triton.next_power_of_2(routing.num_experts // routing.num_groups),
            triton.next_power_of_2(routing.top_k),
            routing.tolerance,
        )


def _slots(held: HeldExperts | None) -> dict[str, Any]:
    """Where the experts are, and how many rows the table has; None: all are here, by number."""
    if held is None:
        return {"slot_ptr": None, "C": 1}
    assert held.slots_CX.is_contiguous()
    return {"slot_ptr": held.slots_CX, "C": len(held.slots_CX)}


class Logits(NamedTuple):
    """Of rows, in parts that are to be added up, and with them a bias."""

    parts_PTX: Tensor  # float32
    bias_X: Tensor | None = None


def route_rows(
    logits: Logits,
    routing: Routing,
    bias_X: Tensor | None,
    weights_TK: Tensor,
    experts_TK: Tensor,
    *,
    counting: Counting | None = None,
    held: HeldExperts | None = None,
    pdl: bool = False,
) -> None:
    """As `route`, into `weights_TK` (float32) and `experts_TK` (int32); all are contiguous.

    Of experts of which some are held here, `experts_TK` are `slots_of`, and the weights of the
    others zero.
    """
    num_parts, num_rows, num_experts = logits.parts_PTX.shape
    assert num_experts == routing.num_experts and num_experts % routing.num_groups == 0
    assert weights_TK.shape == experts_TK.shape == (num_rows, routing.top_k)
    assert logits.parts_PTX.is_contiguous()
    _route_kernel[(num_rows,)](
        logits.parts_PTX,
        num_rows * num_experts,
        logits.bias_X,
        bias_X,
        weights_TK,
        experts_TK,
        *(counting or (None, None)),
        **_slots(held),
        X=num_experts,
        PARTS=num_parts,
        RULE=_Rule.of(routing),
        num_warps=1,  # a choice is a reduction: within a warp it needs no barrier
        **dependent_launch(pdl, weights_TK),
    )


class Router(NamedTuple):
    """What makes the logits of rows, and where they meet."""

    weight_XE: Tensor
    bias_X: Tensor | None
    logits_TX: Tensor  # float32, for as many rows as there may be
    arrivals: Tensor  # int32, 0


def route_few_rows(
    x_TE: Tensor,
    router: Router,
    routing: Routing,
    bias_X: Tensor | None,
    weights_TK: Tensor,
    experts_TK: Tensor,
    *,
    counting: Counting | None = None,
    held: HeldExperts | None = None,
    pdl: bool = False,
) -> None:
    """As `route_rows`, the router's product in the launch: for up to `MAX_ROWS` rows."""
    (num_rows, width), num_experts = x_TE.shape, routing.num_experts
    assert router.weight_XE.shape == (num_experts, width) and num_rows <= MAX_ROWS
    assert len(router.logits_TX) >= num_rows and x_TE.is_contiguous()
    assert weights_TK.shape == experts_TK.shape == (num_rows, routing.top_k)
    block = triton.next_power_of_2(width)
    _router_kernel[(num_experts,)](
        x_TE,
        router.weight_XE,
        router.bias_X,
        router.logits_TX,
        router.arrivals,
        bias_X,
        weights_TK,
        experts_TK,
        *(counting or (None, None)),
        **_slots(held),
        T=num_rows,
        E=width,
        X=num_experts,
        BLOCK_E=block,
        RULE=_Rule.of(routing),
        num_warps=max(1, block // WARP_INPUTS),  # few: choices are reductions
        **dependent_launch(pdl, x_TE),
    )
