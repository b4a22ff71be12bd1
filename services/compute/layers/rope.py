"""Rotary position embedding (Su et al., 2021) in the half-split form of Hugging Face models.

Shape legend: T tokens, N heads, D head width, P positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model stretches its positions beyond the length it was first trained on."""

    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Radians per position of each of the D/2 rotating pairs, float32.

    llama3 (Llama 3.1) leaves wavelengths below original/high alone, divides those above
    original/low by the factor and blends linearly in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_positions * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / scaling.factor)
    return frequencies


def angles(inv_freq: Tensor, num_positions: int) -> Tensor:
    """Float32 angles [P, D]: those of the D/2 pairs, twice over."""
    half = torch.outer(torch.arange(num_positions).float(), inv_freq)
    return torch.cat((half, half), dim=-1)


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and signed sines by position, made once."""

    cos_PD: Tensor
    sin_PD: Tensor  # the first half negated, so that a roll by D/2 replaces rotate-half

    @staticmethod
    def build(angles_PD: Tensor, scale: float, dtype: torch.dtype, device: torch.device) -> Rope:
        """Tables of these float32 angles; `scale` multiplies whatever they rotate."""
        cos, sin = angles_PD.cos().mul_(scale), angles_PD.sin().mul_(scale)
        half = angles_PD.shape[1] // 2
        sin[:, :half].neg_()
        return Rope(cos.to(device=device, dtype=dtype), sin.to(device=device, dtype=dtype))

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of these positions, [T, 1, D] each: looked up once a step for all layers."""
        return (
            self.cos_PD.index_select(0, positions_T).unsqueeze(1),
            self.sin_PD.index_select(0, positions_T).unsqueeze(1),
        )


def rotate(x_TND: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate every head of every token by its position; a new tensor of the same shape."""
    cos_T1D, sin_T1D = rows
    half = x_TND.shape[-1] // 2
    return torch.addcmul(x_TND * cos_T1D, x_TND.roll(half, -1), sin_T1D)
