"""Which experts a row goes to, and with what weights: the rule, and its plain reference.

The CPU routes by the reference; kernels follow it.

Shape legend: T rows, X experts, G groups of them, K experts of a row, C rows of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SMALLEST_SUM = 1e-20
"""What weights are divided by at least, where all of them may round to zero."""


NOWHERE = 0x7FFFFFFF
"""The slot of an expert that another rank has: above all others, so that its rows come last."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a layer's router chooses.

    The scores are the softmax of all experts' logits, or the sigmoid of each. A row goes to the
    `top_k` experts with the highest scores, in `top_groups` groups of adjacent experts where there
    are several: those whose best expert, or best two together, score highest.

    With sparsemixer (Liu et al., 2024), each in turn has its share of the softmax of those that are
    left and whose logits are near its own: by no more than `tolerance` of the larger magnitude. It
    has neither groups nor a bias.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalised: bool = True  # the weights of a row add up to the scale
    scale: float = 1.0  # of the weights
    num_groups: int = 1
    top_groups: int = 1
    group_by: Literal["max", "top2"] = "max"
    tolerance: float = 0.0  # sparsemixer's


@dataclass(frozen=True, slots=True, eq=False)
class HeldExperts:
    """The experts of a mixture that a rank has, each in a slot of its own.

    Rows of number r find their expert's slot in row r % C of the table, and `NOWHERE` where the
    row is another rank's: where several ranks have an expert, they take its rows in turns.
    """

    num_slots: int
    slots_CX: Tensor  # int32

    def slots_of(self, experts_TK: Tensor) -> Tensor:
        """Where the experts are that rows have chosen: int32."""
        row_T = torch.arange(len(experts_TK), device=experts_TK.device) % len(self.slots_CX)
        return self.slots_CX[row_T[:, None], experts_TK.long()]


def route(
    logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] in float32 and experts [T, K] in int32 of logits in float32, best first.

    The bias is added for the choice alone, not to the weights. Of equal scores the lower number
    goes first. The numbers are experts' whatever the logits are, also if they are not finite.
    """
    if routing.scores == "sparsemixer":
        return _mix_sparsely(logits_TX, routing)
    softmax = routing.scores == "softmax"
    scores_TX = torch.softmax(logits_TX, dim=-1) if softmax else torch.sigmoid(logits_TX)
    choice_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if routing.num_groups > 1:
        choice_TX = _in_top_groups(choice_TX, routing)
    experts_TK = _first(choice_TX, routing.top_k)
    weights_TK = scores_TX.gather(1, experts_TK)
    if routing.renormalised:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
    return weights_TK * routing.scale, experts_TK.int()


def _mix_sparsely(logits_TX: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    experts_TK = _first(logits_TX, routing.top_k)
    left_TX, weights = logits_TX, []
    for expert_T1 in experts_TK.split_with_sizes([1] * routing.top_k, 1):
        best_T1 = logits_TX.gather(1, expert_T1)
        size_TX = torch.maximum(logits_TX.abs(), best_T1)
        is_far_TX = best_T1 - logits_TX > routing.tolerance * size_TX
        near_TX = left_TX.masked_fill(is_far_TX, -torch.inf)
        weights.append(torch.softmax(near_TX, dim=-1).gather(1, expert_T1))
        left_TX = left_TX.scatter(1, expert_T1, -torch.inf)
    return torch.cat(weights, 1) * routing.scale, experts_TK.int()


def _in_top_groups(choice_TX: Tensor, routing: Routing) -> Tensor:
    """-inf for experts of other groups."""
    choice_TGX: Tensor = choice_TX.unflatten(1, (routing.num_groups, -1))
    num_best = 1 if routing.group_by == "max" else 2
    groups_TG = choice_TGX.topk(num_best, dim=-1).values.sum(-1)
    is_out_TG = torch.ones_like(groups_TG, dtype=torch.bool)
    is_out_TG.scatter_(1, _first(groups_TG, routing.top_groups), False)
    return choice_TGX.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1)


def _first(scores_TN: Tensor, count: int) -> Tensor:
    """The numbers of the highest scores: of a stable sort, as topk takes any of equal ones."""
    order_TN: Tensor = scores_TN.sort(dim=-1, descending=True, stable=True).indices
    return order_TN[:, :count]
