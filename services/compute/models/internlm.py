"""InternLM 2, 2.5 and 3 (Shanghai AI Laboratory, 2024 and 2025): Llama; 2 merges q, k and v by
kv head."""

from __future__ import annotations

from typing import Any

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.ends import TopNames
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.llama import LlamaConfig
from services.compute.models.llama import build as build_llama

NAMES = TopNames(embedding="model.tok_embeddings", head="output")


class InternLM2Config(FamilyConfig):
    rms_norm_eps: float = 1e-6
    bias: bool = True


class InternLM3Config(FamilyConfig):
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    bias: bool = False


def build2(config: InternLM2Config, make: Builder[Any]) -> Decoder[Any]:
    norm, rope = NormForm(config.rms_norm_eps), make.rope()

    def layer(at: str) -> Layer[Any]:
        mlp = f"{at}.feed_forward"
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.attention_norm", norm),
                make.mixer(
                    make.qkv([f"{at}.attention.wqkv"], rope, config.bias, by_kv_head=True),
                    make.out(f"{at}.attention.wo", config.bias),
                    rope,
                ),
            ),
            Sublayer(
                make.norm(f"{at}.ffn_norm", norm),
                make.gated_mlp_of([f"{mlp}.w1", f"{mlp}.w3"], f"{mlp}.w2"),
            ),
        )

    return make.decoder(layer, norm, NAMES)


def build3(config: InternLM3Config, make: Builder[Any]) -> Decoder[Any]:
    llama = LlamaConfig(
        rms_norm_eps=config.rms_norm_eps, attention_bias=config.qkv_bias, mlp_bias=config.bias
    )
    return build_llama(llama, make, out_bias=config.bias)


INTERNLM2, INTERNLM3 = Family(InternLM2Config, build2), Family(InternLM3Config, build3)
