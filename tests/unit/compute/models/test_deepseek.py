"""What is DeepSeek's own: layers that predict ahead, and the scale that YaRN adds to scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ModelError
from services.compute.config import ComputeSettings
from services.compute.layers.parts import LatentAttention
from services.compute.layers.weighted_layers import KernelLinears
from services.compute.models.decoder import Decoder
from services.compute.models.families import read_config
from services.compute.models.weights import DummyWeights
from services.compute.runner.model_loader import ModelLoader
from tests.unit.compute.tiny_models import LATENTS, SIZES, make_model, save_model

CPU = torch.device("cpu")
LINEARS = KernelLinears(torch.float32, False)
RAW = {**SIZES, **LATENTS, "architectures": ["DeepseekV3ForCausalLM"]}


def scale_of(**changes: Any) -> float:
    weights = DummyWeights(torch.float32, CPU)
    decoder = read_config({**RAW, **changes}).build(weights, LINEARS)
    (scale,) = {mixer.scale for mixer in decoder.mixers}
    return scale


def test_what_yarn_adds_is_in_the_scale_of_scores() -> None:
    plain = scale_of()
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    assert plain == 24**-0.5
    assert scale_of(rope_scaling=yarn) == plain
    stretched = scale_of(rope_scaling={**yarn, "mscale_all_dim": 0.707})
    assert stretched == pytest.approx(plain * 1.5896, rel=1e-4)  # of DeepSeek V2


def test_layers_that_predict_ahead_are_not_read(tmp_path: Path) -> None:
    folder = save_model(make_model("deepseek_v3"), tmp_path)
    file = folder / "model.safetensors"
    ahead = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}
    save_file({**load_file(file), **ahead}, file, metadata={"format": "pt"})

    def decoder() -> Decoder[Any]:
        settings = ComputeSettings(device="cpu", dtype="float32")
        return ModelLoader.read(folder, settings, CPU).decoder(LINEARS)

    said = (folder / "config.json").read_text()
    assert '"num_nextn_predict_layers": 1' in said
    assert len(decoder().layers) == 2
    (folder / "config.json").write_text(said.replace("nextn_predict_layers", "other_layers"))
    with pytest.raises(ModelError, match="eh_proj"):
        decoder()


def test_maps_of_keys_and_values_are_parted_by_head() -> None:
    decoder = read_config(RAW).build(DummyWeights(torch.float32, CPU), LINEARS)
    mixer = decoder.mixers[0]
    assert isinstance(mixer, LatentAttention)
    assert mixer.key_up_HNR.shape == (4, 16, 32)
    assert mixer.value_up_HVR.shape == (4, 16, 32)
    assert (mixer.latent_dim, mixer.entry_dim, mixer.num_kv_heads) == (32, 40, 1)
