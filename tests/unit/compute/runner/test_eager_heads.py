"""Folders of the same head are read alike, whoever wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ModelError
from services.compute.config import ComputeSettings
from services.compute.layers.cpu_linear import CpuLinears
from services.compute.models.draft_head import DraftHead
from services.compute.models.eager_decoder import EagerDecoder
from services.compute.models.eagle import EagleHead
from services.compute.models.medusa import MedusaHeads
from services.compute.runner.eager import CPU
from services.compute.runner.eager_heads import load_head
from services.compute.runner.model_loader import ModelLoader
from tests.unit.compute.draft_heads import save_head
from tests.unit.compute.tiny_models import make_model, save_model

Change = Callable[[dict[str, Any], dict[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]]


def as_speculators(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layer = {name: value for name, value in config.items() if name not in ("draft_vocab_size",)}
    fields = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [2, 1, 0],
        "transformer_layer_config": {**layer, "architectures": None},
    }
    renamed = {name.replace("midlayer", "layers.0"): x for name, x in tensors.items()}
    return fields, renamed | {"embed_tokens.weight": torch.ones(199, 64)}


def as_specforge(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, -1]}}, tensors


def as_modelopt(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    inner = {"eagle_aux_hidden_state_layer_ids": None, "use_aux_hidden_state": True}
    return config | {"eagle_config": inner, "eagle_aux_hidden_state_layer_ids": []}, tensors


def as_the_authors(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return config | {"architectures": ["LlamaForCausalLM"]}, tensors


def as_vllm_eagle(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    renamed = {name if "fc" in name else f"model.{name}": x for name, x in tensors.items()}
    return {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": config}, renamed


def with_biases(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    rows = {f"layers.0.self_attn.{name}_proj": tensors for name in "qkv"}
    biases = {f"{at}.bias": torch.ones(len(tensors[f"{at}.weight"])) for at in rows}
    return config | {"architectures": ["Qwen2ForCausalLM"]}, tensors | biases


def as_vllm_medusa(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    renamed = {}
    for name, x in tensors.items():
        head, part, *rest = name.split(".")
        kept = f"blocks.{head}.layers.0.{rest[-1]}" if part == "0" else f"lm_heads.{head}.weight"
        renamed[kept] = x
    return {"num_heads": 4, "num_hidden_layers": 1}, renamed


def without_lm_head(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return config, {name: x for name, x in tensors.items() if name != "lm_head.weight"}


def load(model: Path, config: str) -> DraftHead | MedusaHeads:
    settings = ComputeSettings(device="cpu", dtype="float32", speculative_config=config)
    loader = ModelLoader.read(model, settings, CPU)
    make_linear = CpuLinears(torch.float32, False)
    decoder = EagerDecoder(loader.decoder(make_linear), 64)
    assert loader.head is not None
    heads = load_head(loader, loader.head, decoder.ends, make_linear).heads
    return heads if isinstance(heads, MedusaHeads) else heads[0]


def rewrite(folder: Path, change: Change, target: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    config, tensors = change(config, load_file(folder / "model.safetensors"))
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return str(target)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("eagle3", as_speculators),
        ("eagle3", as_specforge),
        ("eagle3", as_modelopt),
        ("eagle3", as_the_authors),
        ("medusa", as_vllm_medusa),
    ],
)
def test_folders_of_other_writers_hold_the_same_head(
    method: str, change: Change, tmp_path: Path
) -> None:
    model = make_model("llama")
    folder = save_model(model, tmp_path / "model")
    _, config = save_head(method, model, folder, tmp_path / "head")
    other = rewrite(tmp_path / "head", change, tmp_path / "other")
    heads = [load(folder, config), load(folder, json.dumps(json.loads(config) | {"model": other}))]
    x_SE = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    one, same = (
        head.logits(x_SE, 2) if isinstance(head, MedusaHeads) else head.logits(x_SE)
        for head in heads
    )
    assert torch.equal(one, same) and one.shape == (3, 199)
    assert heads[0].layers == heads[1].layers


@pytest.mark.parametrize("change", [as_vllm_eagle, with_biases])
def test_folders_of_eagle_heads_differ_as_models_do(change: Change, tmp_path: Path) -> None:
    model = make_model("llama")
    folder = save_model(model, tmp_path / "model")
    _, config = save_head("eagle", model, folder, tmp_path / "head")
    other = rewrite(tmp_path / "head", change, tmp_path / "other")
    heads = [load(folder, config), load(folder, json.dumps(json.loads(config) | {"model": other}))]
    assert isinstance(heads[0], EagleHead) and isinstance(heads[1], EagleHead)
    x_S2E = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    joined = [head.join(x_S2E) for head in heads]
    assert torch.equal(*joined)
    first, second = (head.mixers[0].qkv(joined[0]) for head in heads)
    torch.testing.assert_close(second, first + (change is with_biases))


def test_a_head_of_fewer_tokens_without_its_map_is_refused(tmp_path: Path) -> None:
    model = make_model("llama")
    folder = save_model(model, tmp_path / "model")
    _, config = save_head("eagle3", model, folder, tmp_path / "head")
    other = rewrite(tmp_path / "head", without_lm_head, tmp_path / "other")
    with pytest.raises(ModelError, match="draft_vocab_size is 120, and the folder has no lm_head"):
        load(folder, json.dumps(json.loads(config) | {"model": other}))
