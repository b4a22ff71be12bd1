"""Experts of which a checkpoint has all of a layer in one tensor, by a name for each.

gpt-oss and Llama 4 call a map `experts.down_proj`, and its biases `experts.down_proj_bias`; as
transformers multiplies by them the inputs are the rows. MXFP4 has `_blocks` and `_scales`, whose
rows are the outputs.

Shape legend: X experts, I inputs, O outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

_STACKED = re.compile(r"(.+\.experts)\.(\w+_proj)(?:_(bias|blocks|scales))?")


def is_stacked(name: str) -> bool:
    return _STACKED.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class OfExpert:
    """Where one expert's part of a tensor is."""

    stacked: str  # the tensor's name
    number: int
    is_transposed: bool  # [I, O]

    def within(self, stacked: Tensor) -> Tensor:
        part = stacked[self.number]
        return part.t() if self.is_transposed else part


def of_experts(stacked: str, num_experts: int) -> Iterator[tuple[str, OfExpert]]:
    """A name for each expert's part, as where every expert has tensors of its own."""
    match = _STACKED.fullmatch(stacked)
    if match is None:
        raise ValueError(f"{stacked} is no tensor of all experts")
    experts, linear, ending = match.groups()
    for number in range(num_experts):
        part = OfExpert(stacked, number, is_transposed=ending is None)
        yield f"{experts}.{number}.{linear}.{ending or 'weight'}", part
