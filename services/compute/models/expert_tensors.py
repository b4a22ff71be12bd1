"""The tensors of a layer's experts, one expert after the other.

Shape legend: E hidden width, F inner width of an expert, X experts, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.models.safetensors_files import Stack
from services.compute.models.weights import WeightSource
from services.compute.quantization.packed import Packed, Weight


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

MIXTRAL_EXPERTS = ExpertModules(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    gate_up="block_sparse_moe.experts.{}.gate_up_proj",
    down="block_sparse_moe.experts.{}.w2",
)


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The experts of the layer whose name is `at`."""

    weights: WeightSource
    at: str
    modules: ExpertModules
    hidden: int
    inner: int

    def gate_up(self, expert: int) -> Weight:
        """The weight [2 * F, E], the gates first."""
        modules, rows = self._gate_up(expert)
        weight = self.weights.linear(modules, rows, self.hidden)
        order = self._gates_first(modules)
        return weight.rows(order) if isinstance(weight, Packed) else weight[order]

    def down(self, expert: int) -> Weight:
        """The weight [E, F]."""
        return self.weights.linear(
            [self._module(self.modules.down, expert)], [self.hidden], self.inner
        )

    def gate_up_biases(self, num_experts: int) -> Tensor | None:
        """[X, 2 * F], the gates first."""
        if not self.modules.have_bias:
            return None
        modules = [self._gate_up(expert) for expert in range(num_experts)]
        bias_XO = torch.stack([self._bias(*each) for each in modules])
        return bias_XO[:, self._gates_first(modules[0][0])]

    def down_biases(self, num_experts: int) -> Tensor | None:
        """[X, E]."""
        if not self.modules.have_bias:
            return None
        modules = [self._module(self.modules.down, expert) for expert in range(num_experts)]
        return torch.stack([self._bias([module], [self.hidden]) for module in modules])

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

    def _gates_first(self, modules: list[str]) -> Tensor | slice:
        """The order of the rows of these modules."""
        if not self.modules.interleaved or len(modules) > 1:
            return slice(None)
        return torch.arange(2 * self.inner).view(-1, 2).t().flatten()
