"""The tensors of a layer's experts, one expert after the other.

Shape legend: E hidden width, F inner width of an expert, X experts, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ModelError
from services.compute.distributed.expert_balance import layout_of, num_turns, slot_table
from services.compute.distributed.shard import Holders, Shard
from services.compute.kernels.experts.routing import HeldExperts, Routing
from services.compute.models.safetensors_files import Stack
from services.compute.models.weights import WeightSource
from services.compute.quantization.packed import Cut, Weight


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """Modules of a layer's experts, behind the layer's own name; {} is the number of an expert.

    Gate and up are two modules of a checkpoint, or one.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    gate_up: str = "mlp.experts.{}.gate_up_proj"
    down: str = "mlp.experts.{}.down_proj"
    have_bias: bool = False  # the router, too
    interleaved: bool = False  # where gate and up are one module, they take its rows in turns


QWEN_EXPERTS = ExpertModules()
QWEN_STACKS = (
    Stack(".experts.gate_up_proj", ".experts.{}.gate_up_proj.weight"),
    Stack(".experts.down_proj", ".experts.{}.down_proj.weight"),
)
"""As transformers 5 has them in memory, and writes them if it is told to."""

MODELOPT_SCALES = tuple(
    (f"_{ending}", ending) for ending in ("weight_scale", "weight_scale_2", "input_scale")
)
"""How names of stacks end, and of each expert's tensors, where ModelOpt has quantized stacks; they
stand behind those of the weights, since some are one number."""

MIXTRAL_EXPERTS = ExpertModules(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    gate_up="block_sparse_moe.experts.{}.gate_up_proj",
    down="block_sparse_moe.experts.{}.w2",
)


def check_groups(routing: Routing) -> None:
    """Raise ModelError for groups of experts of which a choice cannot be made."""
    count, num_groups, size = routing.num_experts, routing.num_groups, 0
    if 1 <= routing.top_groups <= num_groups and not count % num_groups:
        size = count // num_groups
    if size < (2 if routing.group_by == "top2" else 1) or routing.top_k > size * routing.top_groups:
        raise ModelError(
            f"config.json: {num_groups} groups of experts (n_group), of which a token sees "
            f"{routing.top_groups} (topk_group), make no sense with {count} experts, of which it "
            f"sees {routing.top_k}."
        )


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The experts of the layer whose name is `at`."""

    weights: WeightSource
    at: str
    modules: ExpertModules
    hidden: int
    inner: int
    num_experts: int
    shard: Shard

    @property
    def holders(self) -> Holders | None:
        """Which ranks have which; None: all ranks have a part of each."""
        placement, layer = self.shard.placement, int(self.at.rpartition(".")[2])
        return None if placement is None else placement.holders(layer, self.num_experts)

    @property
    def taken(self) -> list[int]:
        """Experts of which there is something here; the others are left in the files."""
        holders = self.holders or [(self.shard.rank,)] * self.num_experts
        return [expert for expert, ranks in enumerate(holders) if self.shard.rank in ranks]

    @property
    def part(self) -> range:
        """What is taken of the inner width."""
        return self.shard.expert_part(self.inner)

    @property
    def held(self) -> HeldExperts | None:
        """Which are here, and when it is this rank's turn; None: all, always."""
        if self.holders is None:
            return None
        shard, device = self.shard, self.weights.device
        moves = shard.placement is not None and shard.placement.moves
        numbers = range(1, shard.size + 1) if moves else map(len, self.holders)
        layout, turns = layout_of(self.holders, shard.size), num_turns(numbers)
        table = slot_table(layout, shard.rank, self.num_experts, turns)
        return HeldExperts(len(layout[shard.rank]), torch.from_numpy(table).to(device))

    def gate_ups(self) -> Iterator[Weight]:
        """The weights [2 * F, E] of those that are taken, the gates first."""
        taken = {*self.taken}
        for expert in range(self.num_experts):
            modules, rows = self._gate_up(expert)
            if expert in taken:
                cut = Cut(self._gates_first(modules))
                yield self.weights.linear(modules, rows, self.hidden, cut)
            else:
                self.weights.leave(modules, rows, self.hidden)

    def downs(self) -> Iterator[Weight]:
        """The weights [E, F] of those that are taken."""
        cut, taken = Cut(inputs=None if self._is_whole else self.part), {*self.taken}
        for expert in range(self.num_experts):
            modules = [self._module(self.modules.down, expert)]
            if expert in taken:
                yield self.weights.linear(modules, [self.hidden], self.inner, cut)
            else:
                self.weights.leave(modules, [self.hidden], self.inner)

    def gate_up_biases(self) -> Tensor | None:
        """[X, 2 * F] of those that are taken, the gates first."""
        if not self.modules.have_bias:
            return None
        modules = [self._gate_up(expert) for expert in range(self.num_experts)]
        bias_XO = torch.stack([self._bias(*each) for each in modules])[self.taken]
        order = self._gates_first(modules[0][0])
        return bias_XO if order is None else bias_XO[:, order.to(bias_XO.device)]

    def down_biases(self) -> Tensor | None:
        """[X, E] of those that are taken; of parts whose results are added up, one has them."""
        if not self.modules.have_bias:
            return None
        modules = [self._module(self.modules.down, expert) for expert in range(self.num_experts)]
        bias_XE = torch.stack([self._bias([module], [self.hidden]) for module in modules])
        return bias_XE[self.taken] if self._is_whole or not self.shard.rank else None

    def _gate_up(self, expert: int) -> tuple[list[str], list[int]]:
        """Modules, and their rows."""
        one = self._module(self.modules.gate_up, expert)
        if self.weights.has(one):
            return [one], [2 * self.inner]
        both = [self._module(name, expert) for name in (self.modules.gate, self.modules.up)]
        return both, [self.inner, self.inner]

    def _bias(self, modules: list[str], rows: list[int]) -> Tensor:
        return self.weights.stack([f"{module}.bias" for module in modules], rows)

    def _module(self, name: str, expert: int) -> str:
        return f"{self.at}.{name.format(expert)}"

    @property
    def _is_whole(self) -> bool:
        return len(self.part) == self.inner

    def _gates_first(self, modules: list[str]) -> Tensor | None:
        """The rows of these modules that are taken, in their order; None: all, as they are."""
        is_interleaved = self.modules.interleaved and len(modules) == 1
        if not is_interleaved and self._is_whole:
            return None
        rows = torch.arange(2 * self.inner)
        rows = rows.view(-1, 2).t() if is_interleaved else rows.view(2, -1)
        return rows[:, self.part.start : self.part.stop].flatten()
