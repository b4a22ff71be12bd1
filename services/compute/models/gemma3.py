"""Gemma 3 (Google, 2025), its text: as Gemma 2, with norms of heads in place of capped scores.

Five windows stand before each full layer, with a rotation of their own.
"""

from __future__ import annotations

from typing import Any

from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder
from services.compute.models.decoder import Decoder
from services.compute.models.ends import NAMES_BESIDE_IMAGES
from services.compute.models.family import Family
from services.compute.models.gemma2 import Gemma2Config
from services.compute.models.gemma2 import build as build_gemma2

ROPE = RopeDefaults(theta=1_000_000.0, window_theta=10_000.0, scales_windows=False)


class Gemma3Config(Gemma2Config):
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window_pattern: int = 6

    def is_local(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0


def build(config: Gemma3Config, make: Builder[Any]) -> Decoder[Any]:
    return build_gemma2(config, make, ROPE, has_head_norms=True)


def build_beside_images(config: Gemma3Config, make: Builder[Any]) -> Decoder[Any]:
    """The text model of one that sees: its other parts stay in the files."""
    make.skip("vision_tower.", "multi_modal_projector.")
    return build_gemma2(config, make, ROPE, has_head_norms=True, names=NAMES_BESIDE_IMAGES)


GEMMA3 = Family(Gemma3Config, build)
GEMMA3_IMAGES = Family(Gemma3Config, build_beside_images)
