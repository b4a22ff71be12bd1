"""How small random models of families are made by transformers: sizes, rotations, classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.unit.compute.tiny_models import VOCAB_SIZE

WINDOW = 24  # shorter than most prompts
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # sharp enough that float32 rounding does not decide a token
    "tie_word_embeddings": False,
}
EPS = 0.05  # of norms: large enough that another one is heard
BESIDE_IMAGES = "ForConditionalGeneration"
FULL, SLIDING = "full_attention", "sliding_attention"


def rope(kind: str = "default", theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


def yarn(**more: Any) -> dict[str, Any]:
    return rope("yarn", factor=4.0, original_max_position_embeddings=32, **more)


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
LINEAR = rope("linear", factor=4.0)
PLAIN = {"rope_parameters": rope()}
NO_WINDOW = {"sliding_window": 512}


def longrope(num_pairs: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": 32,
        "rope_parameters": rope(
            "longrope",
            original_max_position_embeddings=32,
            short_factor=[1.0 + 0.1 * pair for pair in range(num_pairs)],
            long_factor=[1.0 + 0.7 * pair for pair in range(num_pairs)],
        ),
    }


def save_pretrained(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Family:
    """How transformers makes a model of it."""

    kind: str  # of its classes: <kind>Config, <kind>ForCausalLM
    fields: Mapping[str, Any]
    bites: Mapping[str, Any] = field(default_factory=dict)  # with these it says another text
    window: int = 0
    older: Mapping[str, Any] = field(default_factory=dict)  # instead of layer_types, in older files
    save: Callable[[PreTrainedModel, Path], None] = save_pretrained
    architecture: str = ""  # in config.json, if another than <kind>ForCausalLM
    seed: int = 7

    @property
    def name(self) -> str:
        return self.architecture or f"{self.kind}ForCausalLM"

    @property
    def config_class(self) -> str:
        if self.kind == "Mistral3":
            return "MistralConfig"
        has_own = self.kind in ("Gemma3", "Llama4")
        return f"{self.kind}TextConfig" if has_own else f"{self.kind}Config"

    @property
    def sees(self) -> bool:
        return self.name.endswith(BESIDE_IMAGES)

    def config(self, **changes: Any) -> Any:
        """Return transformers' config, with these fields changed."""
        text = getattr(transformers, self.config_class)(**{**SIZES, **self.fields, **changes})
        if not self.sees:
            return text
        more: dict[str, Any] = {"mm_tokens_per_image": 4} if self.kind == "Gemma3" else {}
        if self.kind == "Mistral3":
            more["tie_word_embeddings"] = text.tie_word_embeddings
        return getattr(transformers, f"{self.kind}Config")(
            text_config=text, vision_config=VISION[self.kind], image_token_index=3, **more
        )

    def model(self, **changes: Any) -> PreTrainedModel:
        """Return an untrained model in eval mode."""
        return self.model_of(self.config(**changes))

    def model_of(self, config: Any) -> PreTrainedModel:
        torch.manual_seed(self.seed)
        if self.sees:
            return getattr(transformers, f"{self.kind}{BESIDE_IMAGES}")(config).eval()
        if self.kind == "InternLM3":  # has no code of its own in transformers
            return transformers.AutoModelForCausalLM.from_config(config).eval()
        return getattr(transformers, f"{self.kind}ForCausalLM")(config).eval()


_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
VISION = {
    "Gemma3": _VISION,
    "Llama4": {
        **_VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    },
    "Mistral3": {**_VISION, "model_type": "pixtral", "head_dim": 8},
}  # fmt: skip


ONES_OR_ZEROS = ("bias", "norm.weight", "norm1.weight", "norm2.weight", "sinks")


def weights_of(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Parameters, and what transformers keeps beside them: the biases of DeepSeek's routers."""
    return [*model.named_parameters(), *model.named_buffers()]


def make_random(model: PreTrainedModel) -> PreTrainedModel:
    """Make its norms and biases random too."""
    with torch.no_grad():
        for name, values in weights_of(model):
            if name.endswith(ONES_OR_ZEROS):
                values.add_(torch.randn_like(values) * 0.2)
    return model
