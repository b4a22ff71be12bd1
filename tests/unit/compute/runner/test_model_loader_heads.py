"""A head is refused by name where it cannot draft for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.compute.runner import registry
from services.compute.runner.eager import CPU
from services.compute.runner.model_loader import ModelLoader
from services.compute.runner.registry import load_runner
from tests.unit.compute.tiny_models import make_model, save_model

FEW_LAYERS = {"num_hidden_layers": 1}
SEES = {"eagle_aux_hidden_state_layer_ids": [1, 0, 1]}  # of a model of one layer


def drafting_with(method: str, folder: Path | None = None, **more: object) -> ComputeSettings:
    named = {} if folder is None else {"model": str(folder)}
    config = json.dumps({"method": method, **named, **more})
    return ComputeSettings(device="cpu", dtype="float32", speculative_config=config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", **FEW_LAYERS), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [
        ("eagle3", {"architectures": ["LlamaForCausalLMEagle"]}, "Eagle, which is no head of the "),
        ("eagle3", {"architectures": ["GlmForCausalLM"]}, "method eagle3; is it one of eagle"),
        ("eagle3", {"norm_output": True}, "norm_output 'True' is not supported"),
        (
            "eagle3",
            {"eagle_config": {"use_aux_hidden_state": False}},
            "hidden_state 'False' is",
        ),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [0, 1]},
            r"sees the layers \[0, 1\], and the",
        ),
        ("eagle", {"draft_vocab_size": 120}, "no head of the method eagle; is it one of eagle3"),
        ("eagle", {"architectures": ["Eagle3Speculator"]}, "no head of the method eagle; is it"),
        ("eagle", {"hidden_size": 32}, "hidden_size is 32, and 64 in the model that it is to dra"),
        ("eagle", {"vocab_size": 50}, "vocab_size is 50, and 199 in the model"),
        ("eagle", {"num_hidden_layers": 2}, "heads of one layer are supported"),
        ("medusa", {"medusa_num_heads": 0}, "medusa_num_heads has to be from 1 to 16, not None"),
        ("medusa", {"medusa_num_heads": 2}, "there are 2 heads, .* lower num_speculative_tokens"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    method: str, changes: dict[str, Any], says: str, model: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text()) | SEES | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"compute.speculative_config: .*{says}"):
        ModelLoader.read(model, drafting_with(method, tmp_path, num_speculative_tokens=3), CPU)


def test_a_model_without_layers_for_further_tokens_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mtp: models of this family have no layers that predict"):
        ModelLoader.read(model, drafting_with("mtp"), CPU)
    config = make_model("deepseek_v3").config.to_dict() | {"num_nextn_predict_layers": 0}
    fields = {"architectures": ["DeepseekV3ForCausalLM"], **config}
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is 0: the model came without"):
        ModelLoader.read(tmp_path, drafting_with("mtp"), CPU)


def test_of_next_token_layers_there_are_as_many_as_there_may_be_drafts(tmp_path: Path) -> None:
    config = make_model("deepseek_v3").config.to_dict() | {"num_nextn_predict_layers": 3}
    fields = {"architectures": ["DeepseekV3ForCausalLM"], **config}
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    one, three, five = (
        ModelLoader.read(tmp_path, drafting_with("mtp", num_speculative_tokens=most), CPU)
        for most in (1, 3, 5)
    )
    assert one.head and three.head
    assert (one.head.num_layers, three.head.num_layers) == (1, 3)
    assert three.head == five.head
    sizes = [head.page_bytes(16, 4) for head in (one.head, three.head)]
    assert sizes[1] == 3 * sizes[0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("prefill_context_parallel_size", "method mtp cannot draft for ranks that share"),
        ("pipeline_parallel_size", "method mtp cannot draft for a model in stages on GPUs"),
    ],
)
def test_heads_do_not_draft_everywhere_on_gpus(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_takes_cuda", lambda settings: True)
    with pytest.raises(ConfigError, match=says):
        load_runner(Path("nowhere"), drafting_with("mtp").model_copy(update={name: 2}))


def test_a_page_has_room_for_states_and_for_what_the_head_keeps(
    model: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "medusa_num_heads": 4}))
    alone = ModelLoader.read(model, drafting_with("ngram"), CPU)
    state_bytes = 64 * 4 * alone.settings.page_tokens
    sizes = [
        ModelLoader.read(model, drafting_with(method, tmp_path), CPU).page_bytes
        for method in ("medusa", "eagle")
    ]
    # a model of one layer keeps as much as a head does
    assert sizes == [
        alone.page_bytes + state_bytes,
        2 * alone.page_bytes + state_bytes,
    ]
