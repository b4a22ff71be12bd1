"""What transformers makes of a text when its keys and values are rounded as ours are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from services.compute.kernels.kv.kv_format import quantize
from tests.unit.compute.tiny_models import VOCAB_SIZE


class RoundedCache(DynamicCache):
    """Layers with a window keep what they are given, beside others."""

    def __init__(self, config: Any, entry: torch.dtype) -> None:
        super().__init__(config=config)
        self._entry = entry
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        self._kinds = kinds if "full_attention" in kinds else ["full_attention"]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if self._kinds[layer_idx % len(self._kinds)] == "full_attention":
            key_states, value_states = self._rounded(key_states), self._rounded(value_states)
        return super().update(key_states, value_states, layer_idx, *args, **more)

    def _rounded(self, x: Tensor) -> Tensor:
        entries, scales = quantize(x, self._entry)
        return (entries.float() * scales.float()[..., None]).to(x.dtype)


class RoundedModel:
    """A model that is always run with such a cache."""

    def __init__(self, model: PreTrainedModel, entry: torch.dtype) -> None:
        self._model = model
        self._entry = entry
        self.device = model.device

    def __call__(self, ids: Tensor) -> Any:
        return self._model(ids, past_key_values=self._cache())

    def greedy_ids(self, prompt: list[int], count: int) -> list[int]:
        """What it generates for one prompt alone, whatever ends it."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self._cache(),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=[VOCAB_SIZE + 1],  # never
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    def _cache(self) -> RoundedCache:
        return RoundedCache(self._model.config, self._entry)
