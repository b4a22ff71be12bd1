"""What config.json of well-known checkpoints says of rotation, in the words of its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.compute.layers.rope import PLAIN, RopeDefaults

PHI3_LONG = [
    1.0299999713897705, 1.0499999523162842, 1.0499999523162842, 1.0799999237060547,
    1.2299998998641968, 1.2299998998641968, 1.2999999523162842, 1.4499999284744263,
    1.5999999046325684, 1.6499998569488525, 1.8999998569488525, 2.859999895095825,
    3.68999981880188, 5.419999599456787, 5.489999771118164, 5.489999771118164,
    9.09000015258789, 11.579999923706055, 15.65999984741211, 15.769999504089355,
    15.789999961853027, 18.360000610351562, 21.989999771118164, 23.079999923706055,
    30.009998321533203, 32.35000228881836, 32.590003967285156, 35.56000518798828,
    39.95000457763672, 53.840003967285156, 56.20000457763672, 57.95000457763672,
    59.29000473022461, 59.77000427246094, 59.920005798339844, 61.190006256103516,
    61.96000671386719, 62.50000762939453, 63.3700065612793, 63.48000717163086,
    63.48000717163086, 63.66000747680664, 63.850006103515625, 64.08000946044922,
    64.760009765625, 64.80001068115234, 64.81001281738281, 64.81001281738281,
]  # fmt: skip
PHI3_SHORT = [
    1.05, 1.05, 1.05, 1.1, 1.1, 1.1, 1.25, 1.25, 1.4, 1.45, 1.55, 1.85, 1.9, *(2.0,) * 19,
    2.1, 2.1, 2.2, 2.35, 2.35, 2.35, 2.35, 2.4, 2.4, 2.65, 2.7, 2.9, 2.95, 3.05, 3.05, 3.05,
]  # fmt: skip
PHI4_MINI_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip

INTERLEAVED = RopeDefaults(interleaved=True)
GLM = RopeDefaults(interleaved=True, partial_rotary_factor=0.5)
GEMMA3 = RopeDefaults(theta=1e6, window_theta=1e4, scales_windows=False)
OLMO3 = RopeDefaults(theta=5e5, scales_windows=False)


@dataclass(frozen=True, slots=True)
class RopeCase:
    """A checkpoint's fields, the transformers family that reads them, and lengths to try."""

    family: str
    head_dim: int
    raw: dict[str, Any]
    defaults: RopeDefaults = PLAIN
    layer_type: str = ""  # of families whose layer types rotate differently
    lengths: tuple[int, ...] = (9000,)


def _case(family: str, hidden: int, heads: int, longest: int, **more: Any) -> RopeCase:
    of_case = {
        name: more.pop(name) for name in ("defaults", "layer_type", "lengths") if name in more
    }
    raw = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": longest,
        **more,
    }
    return RopeCase(family, more.get("head_dim", hidden // heads), raw, **of_case)


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    }  # fmt: skip


def _yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more
    }  # fmt: skip


_PHI3_128K = {
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": PHI3_SHORT, "long_factor": PHI3_LONG},
}
_PHI4_MINI = {
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": PHI4_MINI_LONG,
    },
}
_GEMMA3_4B = {
    "head_dim": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "defaults": GEMMA3,
}
_OLMO3_7B = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        **_yarn(8.0, 8192, beta_fast=32.0, beta_slow=1.0),
        "attention_factor": 1.2079441541679836,
    },
    "defaults": OLMO3,
}
_DEEPSEEK_YARN = _yarn(40.0, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.707)

CASES: dict[str, RopeCase] = {
    "llama 2": _case("llama", 4096, 32, 4096),
    "llama 3.1 8b": _case(
        "llama", 4096, 32, 131072, rope_theta=5e5, rope_scaling=_llama3(8.0)
    ),
    "llama 3.2 1b": _case(
        "llama", 2048, 32, 131072, rope_theta=5e5, rope_scaling=_llama3(32.0), head_dim=64
    ),
    "vicuna 16k": _case(
        "llama", 4096, 32, 4096, rope_scaling={"factor": 4.0, "type": "linear"}
    ),
    "internlm 3": _case(
        "llama", 4096, 32, 32768, head_dim=128, rope_theta=5e7,
        rope_scaling={"factor": 6.0, "rope_type": "dynamic"}, lengths=(9000, 32768, 40000),
    ),
    "qwen2.5 with yarn": _case(
        "qwen2", 3584, 28, 32768, rope_theta=1e6, rope_scaling=_yarn(4.0, 32768)
    ),
    "deepseek's yarn": _case(
        "llama", 2048, 32, 163840, head_dim=64, rope_scaling=_DEEPSEEK_YARN
    ),
    "gpt-oss's yarn": _case(
        "llama", 2880, 64, 131072, head_dim=64, rope_theta=150000,
        rope_scaling=_yarn(32.0, 4096, truncate=False),
    ),
    "yarn by the ratio of lengths": _case(
        "llama", 4096, 32, 131072, rope_scaling=_yarn(None, 32768)  # type: ignore[arg-type]
    ),
    "phi-3 mini 128k": _case("phi3", 3072, 32, 131072, **_PHI3_128K, lengths=(4096, 9000)),
    "phi-4 mini": _case("phi3", 3072, 24, 131072, **_PHI4_MINI, lengths=(4096, 9000)),
    "gemma 3 4b, full layers": _case(
        "gemma3", 2560, 8, 131072, layer_type="full_attention", **_GEMMA3_4B
    ),
    "gemma 3 4b, window layers": _case(
        "gemma3", 2560, 8, 131072, layer_type="sliding_attention", **_GEMMA3_4B
    ),
    "gemma 3 of few words": _case(
        "gemma3", 2560, 8, 131072, head_dim=256, layer_type="sliding_attention", defaults=GEMMA3
    ),
    "olmo 3 7b, full layers": _case(
        "olmo3", 4096, 32, 65536, layer_type="full_attention", **_OLMO3_7B
    ),
    "olmo 3 7b, window layers": _case(
        "olmo3", 4096, 32, 65536, layer_type="sliding_attention", **_OLMO3_7B
    ),
    "glm-4 9b": _case("glm", 4096, 32, 131072, head_dim=128, defaults=GLM),
    "glm-4 0414": _case(
        "glm4", 4096, 32, 32768, head_dim=128, partial_rotary_factor=0.5, defaults=GLM
    ),
    "command-r": _case("cohere", 8192, 64, 131072, rope_theta=8e6, defaults=INTERLEAVED),
    "command-r7b": _case("cohere2", 4096, 32, 132096, rope_theta=50000, defaults=INTERLEAVED),
    "ernie 4.5": _case(
        "ernie4_5", 1024, 16, 131072, head_dim=128, rope_theta=5e5, defaults=INTERLEAVED
    ),
    "minitron 4b": _case(
        "nemotron", 3072, 24, 4096, head_dim=128, partial_rotary_factor=0.5,
    ),
    "hunyuan 7b": _case(
        "hunyuan_v1_dense", 4096, 32, 32768, head_dim=128,
        rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "type": "dynamic",
        },
    ),
    "an odd number of columns": _case(
        "nemotron", 96, 4, 4096, head_dim=24, partial_rotary_factor=0.3, lengths=(50,)
    ),
}  # fmt: skip
