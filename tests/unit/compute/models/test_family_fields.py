"""What a config.json says that its family's models usually do not: done as transformers does it, or
refused, and never passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from common.architectures import ARCHITECTURES
from common.errors import ModelError
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner.packing_runner import PackingRunner
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_server import Server
from tests.unit.compute.models.family_models import ALL_PROMPTS, FAMILIES
from tests.unit.compute.models.family_recipes import (
    FULL,
    LINEAR,
    SIZES,
    SLIDING,
    WINDOW,
    Family,
    make_random,
    save_pretrained,
)

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=4, max_batched_token_mem=1024, num_threads=1
)
COUNT = 4
PROMPT = ALL_PROMPTS[3]
GREEDY = SamplingParams(COUNT, seed=1, temperature=0.0, ignore_eos=True, num_logprobs=0)
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def unusual_fields(family: Family) -> dict[str, dict[str, Any]]:
    """Return changes of a family's config by what they try."""
    usual = family.config().to_dict()
    unusual: dict[str, dict[str, Any]] = {}
    for name in usual:
        if name.endswith("_bias") or name in ("use_qk_norm", "tie_word_embeddings"):
            unusual[name] = {name: not usual[name]}
        if name in ("hidden_act", "hidden_activation"):
            unusual[name] = {name: "silu" if usual[name] != "silu" else "gelu_pytorch_tanh"}
        if name.endswith("_softcapping"):
            unusual[name] = {name: None if usual[name] else 3.0}
        if name.endswith(("_multiplier", "logit_scale", "logits_scaling")):
            unusual[name] = {name: 0.7}
    if "head_dim" in usual:
        unusual["head_dim"] = {"head_dim": 24}
    return unusual | unusual_windows(family, usual) | unusual_rotation(family, usual)


def unusual_windows(family: Family, usual: dict[str, Any]) -> dict[str, dict[str, Any]]:
    unusual: dict[str, dict[str, Any]] = {}
    num_layers = usual["num_hidden_layers"]
    if "sliding_window" in usual and not family.window:
        unusual["sliding_window"] = {"sliding_window": WINDOW}
    if family.kind == "Exaone4":  # without a window all layers rotate
        unusual["sliding_window"] = {"sliding_window": None, "layer_types": [FULL] * num_layers}
    if "layer_types" in usual and "no_rope_layers" not in usual:
        kinds = [SLIDING if number % 2 else FULL for number in range(num_layers)]
        unusual["layer_types"] = {"layer_types": kinds, "sliding_window": WINDOW}
        if "use_sliding_window" in usual:
            unusual["layer_types"]["use_sliding_window"] = True
    return unusual


def unusual_rotation(family: Family, usual: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the kinds of rotation that transformers' class for the config takes, too."""
    rope = usual["rope_parameters"]
    if FULL in rope:
        return {"rope": {"rope_parameters": {FULL: YARN, SLIDING: LINEAR}}}
    unusual = {}
    if "partial_rotary_factor" in rope:  # others pass it over, by accident as it seems
        unusual["rope, partial"] = {"rope_parameters": rope | {"partial_rotary_factor": 0.25}}
    if family.kind not in ("Phi3", "Phimoe", "Ministral3"):
        part = {"partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)}
        unusual["rope, yarn"] = {"rope_parameters": YARN | part}
        unusual["rope, linear"] = {"rope_parameters": LINEAR | part}
    return unusual


ALWAYS_THERE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
EXPERT_SIZES = {
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    "num_experts_per_tok", "moe_topk", "moe_k",
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
}  # fmt: skip
# one family of each architecture, the first, of those that transformers writes in its own words
FIRST = {
    family.name: name
    for name, family in reversed(FAMILIES.items())
    if family.name in ARCHITECTURES and family.save is save_pretrained and not family.sees
}
LEFT_OUT = sorted(FIRST.values()) + ["internlm 3"] * ("InternLM3ForCausalLM" in ARCHITECTURES)
CASES = [
    pytest.param(name, changes, id=f"{name}, {field}")
    for name in sorted(FIRST.values())
    for field, changes in unusual_fields(FAMILIES[name]).items()
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_a_field_is_obeyed_or_refused(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = make_random(family.model(**changes))
    family.save(model, tmp_path)
    try:
        runner = load_on_cpu(tmp_path, SETTINGS)
    except ModelError:
        return
    check(runner, model)


@pytest.mark.parametrize("name", [pytest.param(name) for name in LEFT_OUT])
def test_fields_that_are_left_out_have_the_values_of_transformers(
    name: str, tmp_path: Path
) -> None:
    """Embeddings are small, so that what is added to a square before its root is heard."""
    family = FAMILIES[name]
    sizes = {field: SIZES[field] for field in ALWAYS_THERE}
    sizes |= {field: family.fields[field] for field in EXPERT_SIZES & family.fields.keys()}
    sizes["num_hidden_layers"] = 6  # the last one of Gemma 3 is full
    if family.kind in (
        "Ministral",
        "HunYuanDenseV1",
        "HunYuanMoEV1",
    ):  # transformers has none, and fails
        sizes["head_dim"] = 16
    if family.kind.startswith("Deepseek"):  # which has as many keys as queries, and eight groups
        sizes |= {"num_key_value_heads": 6, "n_routed_experts": 32}
    ids = {field: SIZES[field] for field in SIZES if field.endswith("_token_id")}
    config_class = getattr(transformers, family.config_class)
    model = make_random(family.model_of(config_class(**sizes, **ids, initializer_range=0.1)))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(tmp_path)
    raw = {"architectures": [family.name], "model_type": model.config.model_type, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check(load_on_cpu(tmp_path, SETTINGS), model)


def check(runner: PackingRunner, model: PreTrainedModel) -> None:
    """It says what transformers says."""
    server = Server(runner, SETTINGS)
    server.ask(0, PROMPT, GREEDY)
    server.run()
    ids = PROMPT + server.tokens[0]
    with torch.inference_mode():
        logits_CV = model(torch.tensor([ids]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    assert logits_CV.argmax(-1).tolist() == server.tokens[0]
    expected = logits_CV.log_softmax(-1).amax(-1).numpy()
    near = max(2e-6, 2e-4 * float(logits_CV.std()))  # tied heads of small embeddings say little
    assert np.allclose([row.chosen for row in server.logprobs[0]], expected, rtol=0.0, atol=near)
