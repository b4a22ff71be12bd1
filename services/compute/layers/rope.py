"""Rotary position embedding (Su et al., 2021): every form that dense decoders use, as one form.

Kernels rotate the halves of a whole head against each other, pair i being columns i and D/2 + i.
Other forms become this one when a model is loaded: interleaved pairs (Cohere, GLM-4, ERNIE 4.5)
and heads of which only the first columns rotate by another order of the rows that make queries and
keys, columns that do not rotate by frequency 0 (cosine 1, sine 0). Queries and keys change their
order alike, so their products stay what they were.

transformers lets frequencies of the kinds dynamic and longrope follow the length of the text. Here
they are fixed when a model is loaded, by the longest text that it may get (max_model_len), as vLLM
does: if that is beyond the length of the training, the stretched form is used at all positions,
those of short texts too. A cached key can then be shared by texts of any length.

Shape legend: T tokens, N heads, D head width, J = D/2 pairs, R pairs that rotate, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from common.errors import ModelError


class RopeScaling(Protocol):
    """How a model stretches its positions beyond the length it was first trained on."""

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        ...

    def frequencies(self, theta: float, rotary_dim: int, num_positions: int) -> Tensor:
        """Radians per position of each rotating pair, float32 [R]."""
        ...


def _powers(theta: float, rotary_dim: int) -> Tensor:
    return theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor; factor 1 is plain rotation."""

    factor: float = 1.0
    attention_factor: float = 1.0

    def frequencies(self, theta: float, rotary_dim: int, num_positions: int) -> Tensor:
        return 1.0 / _powers(theta, rotary_dim) / self.factor


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """A larger base for texts beyond the original length (NTK-aware scaling)."""

    factor: float
    original_max_positions: int
    attention_factor: float = 1.0

    def frequencies(self, theta: float, rotary_dim: int, num_positions: int) -> Tensor:
        length = max(num_positions, self.original_max_positions)
        stretch = self.factor * length / self.original_max_positions - (self.factor - 1)
        return 1.0 / _powers(theta * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides slow pairs by the factor, leaves fast ones alone and blends in between.

    Slow and fast are counted in turns over the original length.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    attention_factor: float = 1.0

    def frequencies(self, theta: float, rotary_dim: int, num_positions: int) -> Tensor:
        fast_R = 1.0 / _powers(theta, rotary_dim)
        turns_R = self.original_max_positions / (2 * math.pi / fast_R)
        span = self.high_freq_factor - self.low_freq_factor
        keep_R = ((turns_R - self.low_freq_factor) / span).clamp(0.0, 1.0)
        return (1 - keep_R) * fast_R / self.factor + keep_R * fast_R


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): as llama3, by a ramp over the pairs' numbers."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ramp begins and ends at whole numbers

    def frequencies(self, theta: float, rotary_dim: int, num_positions: int) -> Tensor:
        powers_R = _powers(theta, rotary_dim)
        low = self._pair(self.beta_fast, theta, rotary_dim)
        high = self._pair(self.beta_slow, theta, rotary_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        span = (high - low) or 0.001
        ramp_R = ((torch.arange(len(powers_R), dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
        keep_R = 1 - ramp_R
        return 1.0 / (self.factor * powers_R) * (1 - keep_R) + 1.0 / powers_R * keep_R

    def _pair(self, turns: float, theta: float, rotary_dim: int) -> float:
        """The pair that makes so many turns over the original length, as a fraction."""
        angle = self.original_max_positions / (turns * 2 * math.pi)
        return rotary_dim * math.log(angle) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024): a factor for each pair, of one list or of another."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float

    def frequencies(self, theta: float, rotary_dim: int, num_positions: int) -> Tensor:
        is_long = num_positions > self.original_max_positions
        factors_R = torch.tensor(self.long_factor if is_long else self.short_factor)
        return 1.0 / (factors_R * _powers(theta, rotary_dim))


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How the heads of a layer rotate. Layers of equal specs share tables."""

    head_dim: int
    rotary_dim: int  # the first so many columns of a head; 0: no rotation (NoPE)
    theta: float = 10000.0
    scaling: RopeScaling = LinearScaling()
    interleaved: bool = False  # the checkpoint's pairs are columns 2i and 2i + 1

    @property
    def num_pairs(self) -> int:
        """R: an odd number of columns is rounded up."""
        return (self.rotary_dim + 1) // 2

    def frequencies(self, num_positions: int) -> Tensor:
        """Radians per position of each pair, float32 [J]; 0 for pairs that do not rotate."""
        padded_J = torch.zeros(self.head_dim // 2)
        if self.rotary_dim:
            padded_J[: self.num_pairs] = self.scaling.frequencies(
                self.theta, self.rotary_dim, num_positions
            )
        return padded_J

    def tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [P, J], for texts of at most P tokens.

        The attention factor is in those of pairs that rotate and of no others.
        """
        positions_P = torch.arange(num_positions).float()
        angles_PJ = torch.outer(positions_P, self.frequencies(num_positions))
        cos_PJ, sin_PJ = angles_PJ.cos(), angles_PJ.sin()
        for table_PJ in (cos_PJ, sin_PJ):
            table_PJ[:, : self.num_pairs] *= self.scaling.attention_factor
        return cos_PJ, sin_PJ

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint's rows stand in order as they are."""
        return self.rotary_dim == self.head_dim and not self.interleaved

    def row_order(self) -> Tensor:
        """Which of the checkpoint's D rows of a head stands at each place here, int64 [D]."""
        rotating, half = 2 * self.num_pairs, self.head_dim // 2 - self.num_pairs
        rows_D = torch.arange(self.head_dim)
        turning, still = rows_D[:rotating], rows_D[rotating:]
        if self.interleaved:
            first, second = turning[0::2], turning[1::2]
        else:
            first, second = turning[: self.num_pairs], turning[self.num_pairs :]
        return torch.cat((first, still[:half], second, still[half:]))

    def in_order(self, rows: Tensor) -> Tensor:
        """Queries' or keys' weights [N * D, E], biases or norms [N * D], in this order."""
        order_D = self.row_order().to(rows.device)
        heads = rows.reshape(-1, self.head_dim, *rows.shape[1:])
        return heads[:, order_D].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """What a family's config.json leaves out, or cannot say."""

    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    window_theta: float = 0.0  # of layers with a window; 0: the same
    scales_windows: bool = True  # False: in an older config.json, scaling is of full layers only


PLAIN = RopeDefaults()


def read_rope(
    raw: Mapping[str, Any],
    head_dim: int,
    layer_type: str = "full_attention",
    family: RopeDefaults = PLAIN,
) -> RopeSpec:
    """Read the rotation of layers of a type; ModelError names what is not supported.

    transformers 5 writes rope_parameters, for each layer type if they differ; older files have
    rope_theta, rope_scaling, partial_rotary_factor and Gemma 3's rope_local_base_freq.
    """
    values: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = raw.get("rope_theta") or family.theta
    has_window = layer_type == "sliding_attention"
    if layer_type in values or any(isinstance(value, Mapping) for value in values.values()):
        theta = (has_window and family.window_theta) or theta
        of_type = values.get(layer_type, {})
        if of_type is None:
            return RopeSpec(head_dim, 0)
        values = of_type
    elif has_window and not family.scales_windows:
        base = raw.get("rope_local_base_freq") or family.window_theta
        values = {"rope_theta": base or values.get("rope_theta")}
    theta = _above({"rope_theta": values.get("rope_theta") or theta}, "rope_theta", 1.0)
    rotary_dim = _rotary_dim(values, raw, head_dim, family.partial_rotary_factor)
    kind = str(values.get("rope_type") or values.get("type") or "default")
    if kind in ("su", "yarn") and "long_factor" in values:  # longrope in the first Phi-3 files
        kind = "longrope"
    if kind == "dynamic" and values.get("alpha"):  # Hunyuan: a larger base at every length
        theta *= _above(values, "alpha") ** (head_dim / (head_dim - 2))
        kind = "default"
    scaling = SCALINGS[kind](values, raw)
    spec = RopeSpec(head_dim, rotary_dim, theta, scaling, family.interleaved)
    if isinstance(scaling, LongRopeScaling):
        lengths = {len(scaling.short_factor), len(scaling.long_factor)}
        if lengths != {spec.num_pairs}:
            raise ModelError(
                f"config.json: short_factor and long_factor must have {spec.num_pairs} values, "
                "one for each pair of columns that rotates."
            )
    return spec


def _rotary_dim(
    values: Mapping[str, Any], raw: Mapping[str, Any], head_dim: int, default: float
) -> int:
    """Return how many columns of a head rotate."""
    if "rotary_dim" in raw:
        rotary_dim = int(raw["rotary_dim"])
    else:
        part = values.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or default
        rotary_dim = int(head_dim * float(part))
    if head_dim % 2 or not 2 < rotary_dim <= head_dim:
        raise ModelError(
            f"config.json: rotation of {rotary_dim} columns of a head of {head_dim} is not "
            "supported; the head's width must be even, and more than 2 columns rotate."
        )
    return rotary_dim


def _above(values: Mapping[str, Any], name: str, limit: float = 0.0) -> float:
    """Return a number that must be given, and be above the limit."""
    if values.get(name) is None:
        kind = values.get("rope_type") or values.get("type")
        raise ModelError(f"config.json: rope scaling {kind!r} needs {name!r}.")
    value = float(values[name])
    if not limit < value < math.inf:
        raise ModelError(f"config.json: {name} must be above {limit:g}, not {value:g}.")
    return value


def _original(values: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """Return the length of the first training; Phi-3 says it outside of the other values."""
    name = "original_max_position_embeddings"
    found = raw.get(name) or values.get(name) or raw.get("max_position_embeddings")
    return int(_above({**values, name: found}, name))


def _stretch(values: Mapping[str, Any], raw: Mapping[str, Any]) -> float:
    """Return the factor, or by how much the positions are more than the original ones."""
    if values.get("factor") is not None:
        return _above(values, "factor")
    return _above(raw, "max_position_embeddings") / _original(values, raw)


def _dynamic(values: Mapping[str, Any], raw: Mapping[str, Any]) -> DynamicScaling:
    return DynamicScaling(_above(values, "factor"), int(_above(raw, "max_position_embeddings")))


def _llama3(values: Mapping[str, Any], raw: Mapping[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        _above(values, "factor"),
        _above(values, "low_freq_factor"),
        _above(values, "high_freq_factor"),
        _original(values, raw),
    )


def _yarn(values: Mapping[str, Any], raw: Mapping[str, Any]) -> YarnScaling:
    factor = _stretch(values, raw)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        attention_factor = magnitude(1.0)
        if mscale and mscale_all_dim:
            attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
    return YarnScaling(
        factor,
        _original(values, raw),
        float(attention_factor),
        float(values.get("beta_fast") or 32.0),
        float(values.get("beta_slow") or 1.0),
        bool(values.get("truncate", True)),
    )


def _longrope(values: Mapping[str, Any], raw: Mapping[str, Any]) -> LongRopeScaling:
    factor, original = _stretch(values, raw), _original(values, raw)
    attention_factor = values.get("short_mscale", values.get("attention_factor"))
    if values.get("short_mscale") != values.get("long_mscale"):
        raise ModelError("config.json: short_mscale and long_mscale differ; they must not.")
    if attention_factor is None:
        beyond = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + beyond)
    return LongRopeScaling(
        _factors(values, "short_factor"),
        _factors(values, "long_factor"),
        original,
        float(attention_factor),
    )


def _factors(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    if name not in values:
        raise ModelError(f"config.json: rope scaling 'longrope' needs {name!r}.")
    return tuple(_above({name: value}, name) for value in values[name])


SCALINGS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], RopeScaling]] = {
    "default": lambda values, raw: LinearScaling(),
    "linear": lambda values, raw: LinearScaling(_above(values, "factor")),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and signed sines by position, made once."""

    cos_PD: Tensor
    sin_PD: Tensor  # the first half negated, so that a roll by D/2 replaces rotate-half

    @staticmethod
    def build(
        tables: tuple[Tensor, Tensor], scale: float, dtype: torch.dtype, device: torch.device
    ) -> Rope:
        """Of the tables [P, J] of a spec; `scale` multiplies whatever they rotate."""
        cos_PJ, sin_PJ = (table_PJ * scale for table_PJ in tables)
        cos_PD, sin_PD = torch.cat((cos_PJ, cos_PJ), -1), torch.cat((-sin_PJ, sin_PJ), -1)
        return Rope(cos_PD.to(device=device, dtype=dtype), sin_PD.to(device=device, dtype=dtype))

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of these positions, [T, 1, D] each: looked up once a step for all layers."""
        return (
            self.cos_PD.index_select(0, positions_T).unsqueeze(1),
            self.sin_PD.index_select(0, positions_T).unsqueeze(1),
        )


def rotate(x_TND: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate every head of every token by its position, in place; returns it.

    The rows are [T, 1, D], or [T, N, D] where heads have different ones.
    """
    cos, sin = rows
    rolled_TND = x_TND.roll(x_TND.shape[-1] // 2, -1)
    return x_TND.mul_(cos).addcmul_(rolled_TND, sin)
