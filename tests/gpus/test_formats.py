"""Quantised weights are split over GPUs by their codes, in all formats: each scale is heard in
float32, and in bfloat16, in which they are served, all but rounding is the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from common.gguf.folder import folder_of
from tests.gguf_files import GgufOptions, write_gguf
from tests.gpus.groups import (
    NEEDS_GPUS,
    SETTINGS,
    WAYS,
    Groups,
    check_alike,
    check_near,
)
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.models.family_recipes import make_random
from tests.unit.compute.quantization.checkpoints import FORMS, mxfp4_folder, quantize_folder

pytestmark = NEEDS_GPUS

TOLERANCE = 0.01
"""Inputs of packed weights are rounded to 16 bits, by the largest that a rank has."""

BOUND = 0.15
"""Of bfloat16, and of inputs that are rounded to 8 bits; a part that is missing makes it 1."""

SIZES = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 512,
    "initializer_range": 0.1,
}  # fmt: skip
DENSE = "llama with biases"
MIXTURE = "qwen3 moe"
MIXTURES = {MIXTURE: {"moe_intermediate_size": 128}, "gpt-oss": {"intermediate_size": 128}}
NOT_QUANTIZED = re.compile(r"embed|norm|lm_head|mlp\.gate\.")

Make = Callable[[Path], Path]


@cache
def model(name: str) -> PreTrainedModel:
    return make_random(FAMILIES[name].model(**{**SIZES, **MIXTURES.get(name, {})}))


def plain(name: str, folder: Path) -> Path:
    FAMILIES[name].save(model(name), folder)
    return folder


def written(name: str, form: str, folder: Path) -> Path:
    folder, to = plain(name, folder), folder / "quantized"
    quantize_folder(folder, to, FORMS[form], NOT_QUANTIZED)
    return to


def mxfp4(folder: Path) -> Path:
    folder, to = plain("gpt-oss", folder), folder / "mxfp4"
    mxfp4_folder(folder, to)
    return to


def gguf(kind: str, folder: Path) -> Path:
    file = write_gguf(plain("llama", folder), folder / "model.gguf", GgufOptions(kind))
    return folder_of(file, {"XDG_CACHE_HOME": str(folder / "cache")})


class Case:
    """A folder, settings, and the ways in which it is split."""

    def __init__(self, make: Make, *ways: str, dtype: str = "float32", **settings: Any) -> None:
        self.make = make
        self.ways = ways or ("-tp 2",)
        self.settings: Mapping[str, Any] = {"dtype": dtype, **settings}


WIDE = {
    **{form: Case(partial(written, DENSE, form)) for form in (
        "compressed fp8 of blocks", "compressed fp8 of rows", "compressed int8 with zeros", "awq",
        "gptq in several act orders", "compressed nvfp4",
    )},
    "experts in awq": Case(partial(written, MIXTURE, "awq"), "-tp 2", "-tp 2 -ep"),
    "experts in compressed fp8 of blocks": Case(
        partial(written, MIXTURE, "compressed fp8 of blocks"), "-tp 2 -ep"
    ),
    "experts in mxfp4": Case(mxfp4, "-tp 2", "-tp 2 -ep", "-pp 2"),
    "Q4_0": Case(partial(gguf, "Q4_0")),
    "Q8_0": Case(partial(gguf, "Q8_0")),
    "int4 at load": Case(partial(plain, DENSE), quantization="int4"),
}  # fmt: skip

bfloat16 = partial(Case, dtype="bfloat16")
NARROW = {
    "bfloat16": bfloat16(partial(plain, DENSE), "-tp 2", "-pp 2 -tp 2", "-pcp 2"),
    "experts in bfloat16": bfloat16(partial(plain, MIXTURE), "-tp 2", "-tp 4 -ep"),
    **{form: bfloat16(partial(written, DENSE, form)) for form in (
        "fp8 of blocks", "fbgemm_fp8", "compressed fp8 and inputs", "compressed int8 and inputs",
        "awq", "gptq",
    )},
    "experts in fp8 of blocks": bfloat16(partial(written, MIXTURE, "fp8 of blocks"), "-tp 2 -ep"),
    "experts in mxfp4": bfloat16(mxfp4, "-tp 2", "-tp 2 -ep"),
    "a cache in fp8": bfloat16(partial(plain, "gemma 3"), kv_cache_dtype="fp8"),
    "int8 at load": bfloat16(partial(plain, DENSE), "-tp 2", "-pp 2", quantization="int8"),
    "fp8 at load": bfloat16(partial(plain, DENSE), quantization="fp8"),
    "experts in int4 at load": bfloat16(partial(plain, MIXTURE), "-tp 2 -ep", quantization="int4"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Case], Path]:
    made: dict[str, Path] = {}

    def find(name: str, case: Case) -> Path:
        if name not in made:
            made[name] = case.make(tmp_path_factory.mktemp("model"))
        return made[name]

    return find


def ways(cases: Mapping[str, Case]) -> list[tuple[str, str]]:
    return [(name, way) for name, case in cases.items() for way in case.ways]


@pytest.mark.parametrize(("name", "way"), ways(WIDE))
def test_in_float32_several_gpus_say_what_one_says(
    name: str, way: str, groups: Groups, folder_for: Callable[[str, Case], Path]
) -> None:
    case = WIDE[name]
    settings = SETTINGS.model_copy(update=case.settings)
    check_alike(*groups.both(folder_for(name, case), settings, WAYS[way]), TOLERANCE)


@pytest.mark.parametrize(("name", "way"), ways(NARROW))
def test_in_bfloat16_several_gpus_say_nearly_what_one_says(
    name: str, way: str, groups: Groups, folder_for: Callable[[str, Case], Path]
) -> None:
    case = NARROW[name]
    settings = SETTINGS.model_copy(update=case.settings)
    check_near(*groups.both(folder_for(name, case), settings, WAYS[way]), BOUND)
