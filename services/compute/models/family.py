"""What a family is: the fields of config.json that it reads, and how its decoder is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, Self, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import ModelError
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers.parts import Layer
from services.compute.models.builder import Builder
from services.compute.models.decoder import Decoder
from services.compute.models.safetensors_files import Stack

Build: TypeAlias = Callable[[Any, Builder[Any]], Decoder[Any]]
Layers: TypeAlias = Callable[[Any, Builder[Any]], Callable[[str], Layer[Any]]]


class FamilyConfig(BaseModel):
    """Fields of config.json beside the sizes, with the defaults of transformers; those of the
    rotation are among them.

    A field of a family has the type of the values that are supported; others are refused by name.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore", strict=False)

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ModelError for what is not supported or makes no sense.

        A field that is null is one that is not there, unless null is a value of it.
        """
        nullable = {
            name
            for name, field in cls.model_fields.items()
            if NoneType in (field.annotation, *get_args(field.annotation))
        }
        rotation = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        raw = {**rotation, **raw}
        given = {n: value for n, value in raw.items() if value is not None or n in nullable}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "a field"
            value = str(first["input"])[:60]
            raise ModelError(
                f"config.json: {name} {value!r} is not supported ({first['msg']})."
            ) from None

    def spans(self, num_layers: int) -> tuple[AttentionSpan, ...]:
        """Which positions the queries of each layer see."""
        return (FULL,) * num_layers


class LocalConfig(FamilyConfig):
    """Some layers see a part only: those that `layer_types` names, or those of a default."""

    layer_types: list[str] | None = None
    local_type: ClassVar[str]  # of layer_types

    @property
    @abstractmethod
    def local_span(self) -> AttentionSpan:
        """What these see."""

    def is_local(self, layer: int) -> bool:
        """Whether a layer is one of them where config.json has no `layer_types`."""
        return True

    def spans(self, num_layers: int) -> tuple[AttentionSpan, ...]:
        local = self.local_span
        if self.layer_types is None:
            return tuple(local if self.is_local(number) else FULL for number in range(num_layers))
        unknown = set(self.layer_types) - {"full_attention", self.local_type}
        if unknown or len(self.layer_types) < num_layers:
            wrong = ", ".join(sorted(unknown)) or f"{len(self.layer_types)} names"
            raise ModelError(
                f"config.json: layer_types must be full_attention or {self.local_type} for each of "
                f"{num_layers} layers, not {wrong}."
            )
        types = self.layer_types[:num_layers]
        return tuple(local if kind == self.local_type else FULL for kind in types)


class WindowedConfig(LocalConfig):
    """Some layers see a window."""

    sliding_window: int | None = None
    local_type: ClassVar[str] = "sliding_attention"

    @property
    def local_span(self) -> AttentionSpan:
        window = self.sliding_window or 0
        if window < 0:
            raise ModelError(f"config.json: sliding_window must not be negative, as {window} is.")
        return AttentionSpan.window(window)


def rotates(layer: int, no_rope_layers: list[int] | None, interval: int) -> bool:
    """Whether a layer sees positions: as the list says with a 1, or all but each so many-th."""
    return bool(no_rope_layers[layer]) if no_rope_layers else (layer + 1) % interval != 0


@dataclass(frozen=True, slots=True)
class Family:
    config: type[FamilyConfig]
    build: Build
    stacks: tuple[Stack, ...] = ()  # that its checkpoints have, or may have
    next_token_layers: Layers | None = None  # makes those behind the last one that draft
