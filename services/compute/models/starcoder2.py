"""StarCoder2 (BigCode, 2024): layer norms, biases, an MLP without a gate."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig


class Starcoder2Config(WindowedConfig):
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    norm_epsilon: float = 1e-5
    use_bias: bool = True


def build(config: Starcoder2Config, make: Builder[Any]) -> Decoder[Any]:
    norm = NormForm(config.norm_epsilon, kind="layer", has_bias=True, round_first=False)
    rope, bias = make.rope(), config.use_bias

    def layer(at: str) -> Layer[Any]:
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.attention(f"{at}.self_attn", rope, qkv_bias=bias, out_bias=bias),
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.mlp(f"{at}.mlp.c_fc", f"{at}.mlp.c_proj", bias, "gelu_tanh"),
            ),
        )

    return make.decoder(layer, norm)


STARCODER2 = Family(Starcoder2Config, build)
