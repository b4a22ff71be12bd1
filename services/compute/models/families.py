"""The families that are served, by the architecture that config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from common.architectures import family_of, language_fields
from common.decoder_shape import DecoderShape, read_shape
from common.errors import ModelError
from services.compute.distributed.shard import WHOLE, Shard
from services.compute.kernels.step.span import AttentionSpan
from services.compute.layers.rope import read_rope
from services.compute.layers.weighted_layers import LinearMaker
from services.compute.models.builder import Builder
from services.compute.models.cohere import COHERE, COHERE2
from services.compute.models.decoder import Decoder
from services.compute.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from services.compute.models.ernie_moe import ERNIE_MOE
from services.compute.models.exaone4 import EXAONE4
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.gemma import GEMMA
from services.compute.models.gemma2 import GEMMA2
from services.compute.models.gemma3 import GEMMA3, GEMMA3_IMAGES
from services.compute.models.glm import GLM, GLM4
from services.compute.models.glm_moe import GLM_MOE
from services.compute.models.gpt_oss import GPT_OSS
from services.compute.models.granite import GRANITE, GRANITE_MOE
from services.compute.models.hunyuan import HUNYUAN, HUNYUAN_MOE
from services.compute.models.internlm import INTERNLM2, INTERNLM3
from services.compute.models.llama import (
    ERNIE,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    MISTRAL3_IMAGES,
    SEED_OSS,
)
from services.compute.models.llama4 import LLAMA4, LLAMA4_IMAGES
from services.compute.models.minimax import MINIMAX
from services.compute.models.mixtral import MIXTRAL
from services.compute.models.nemotron import ARCEE, NEMOTRON
from services.compute.models.olmo import OLMO2, OLMO3
from services.compute.models.olmoe import OLMOE
from services.compute.models.phi3 import PHI3
from services.compute.models.phi_moe import PHI_MOE
from services.compute.models.qwen import QWEN2, QWEN3
from services.compute.models.qwen_moe import QWEN2_MOE, QWEN3_MOE
from services.compute.models.smollm3 import SMOLLM3
from services.compute.models.starcoder2 import STARCODER2
from services.compute.models.weights import WeightSource

L = TypeVar("L")

FAMILIES: Mapping[str, Family] = {
    "ArceeForCausalLM": ARCEE,
    "Cohere2ForCausalLM": COHERE2,
    "CohereForCausalLM": COHERE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Ernie4_5ForCausalLM": ERNIE,
    "Ernie4_5_MoeForCausalLM": ERNIE_MOE,
    "Exaone4ForCausalLM": EXAONE4,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3_IMAGES,
    "GemmaForCausalLM": GEMMA,
    "Glm4ForCausalLM": GLM4,
    "Glm4MoeForCausalLM": GLM_MOE,
    "GlmForCausalLM": GLM,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE,
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "HunYuanMoEV1ForCausalLM": HUNYUAN_MOE,
    "InternLM2ForCausalLM": INTERNLM2,
    "InternLM3ForCausalLM": INTERNLM3,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4_IMAGES,
    "LlamaForCausalLM": LLAMA,
    "MiniMaxM2ForCausalLM": MINIMAX,
    "Ministral3ForCausalLM": MINISTRAL3,
    "MinistralForCausalLM": MISTRAL,
    "Mistral3ForConditionalGeneration": MISTRAL3_IMAGES,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MIXTRAL,
    "NemotronForCausalLM": NEMOTRON,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "OlmoeForCausalLM": OLMOE,
    "Phi3ForCausalLM": PHI3,
    "PhimoeForCausalLM": PHI_MOE,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "SeedOssForCausalLM": SEED_OSS,
    "SmolLM3ForCausalLM": SMOLLM3,
    "Starcoder2ForCausalLM": STARCODER2,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """config.json of a supported model, read and checked."""

    raw: Mapping[str, Any]  # the language model's
    shape: DecoderShape
    family: Family
    fields: FamilyConfig
    spans: tuple[AttentionSpan, ...]  # which positions the queries of each layer see

    def build(
        self,
        weights: WeightSource,
        make_linear: LinearMaker[L],
        needs_head: bool = True,
        shard: Shard = WHOLE,
    ) -> Decoder[L]:
        """Take all tensors of a checkpoint; raises ModelError for what is missing or left over."""
        make = Builder(self.shape, self.raw, self.spans, weights, make_linear, shard)
        make.needs_head = needs_head
        return self.family.build(self.fields, make)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Raises ModelError for what is not supported or makes no sense."""
    family = FAMILIES[family_of(raw)]
    shape, fields = read_shape(raw), language_fields(raw)
    try:
        known = family.config.read(fields)
        read_rope(fields, shape.head_dim)  # so that it is refused before the weights are read
        return ModelConfig(fields, shape, family, known, known.spans(shape.num_layers))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(f"config.json makes no sense: {error}.") from error
