"""What a compute says of the model that it has loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.config import ModelSettings
from common.errors import ConfigError, ModelError
from services.compute.config import ComputeSettings
from services.compute.device import ModelDevice, grammar_settings, scheduler_settings
from tests.unit.compute.fake_device import make_spec


def _device(folder: Path, generation_config: str) -> ModelDevice:
    config = {"vocab_size": 320, "max_position_embeddings": 64, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(generation_config)
    return ModelDevice(ModelSettings(path=str(folder)), ComputeSettings(device="sim"))


def test_the_card_has_the_models_sampling_settings(tmp_path: Path) -> None:
    _, _, card, _ = _device(tmp_path, '{"top_k": 20, "temperature": 0.6}').load()
    assert card.sampling_defaults == (("temperature", 0.6), ("top_k", 20.0))
    assert (card.max_model_len, card.max_output_length) == (64, 63)


def test_a_model_with_a_broken_sampling_setting_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="top_p should be"):
        _device(tmp_path, '{"top_p": 7}').load()


def test_a_broken_setting_of_drafts_is_said_before_weights_are_read(tmp_path: Path) -> None:
    _device(tmp_path, "{}")  # without weights
    settings = ComputeSettings(device="cpu", speculative_config="on")
    with pytest.raises(ConfigError, match="speculative_config: Invalid JSON"):
        ModelDevice(ModelSettings(path=str(tmp_path)), settings).load()


def test_fields_of_vllm_without_effect_are_named_in_a_warning(tmp_path: Path) -> None:
    _device(tmp_path, "{}")
    config = '{"method": "ngram", "draft_tensor_parallel_size": 1, "max_model_len": 64}'
    settings = ComputeSettings(device="sim", speculative_config=config)
    with capture_logs() as logs, pytest.raises(ConfigError, match="sim has no text to guess from"):
        ModelDevice(ModelSettings(path=str(tmp_path)), settings).load()
    (warning,) = (log["event"] for log in logs if log["log_level"] == "warning")
    said = "draft_tensor_parallel_size, max_model_len: without effect here"
    assert warning == f"speculative_config: {said}"


def test_kept_grammars_leave_half_of_the_mask_workers_memory_to_sequences() -> None:
    for memory_mb in (64, 1024, 8192):
        settings = ComputeSettings(device="sim", grammar_memory_mb=memory_mb)
        worker = grammar_settings("/nowhere", settings, make_spec())
        assert 0 < worker.cache_bytes * 95 < memory_mb << 19  # of compiled ones, as measured


def test_who_shares_no_prefixes_keeps_no_answers() -> None:
    for shares in (True, False):
        settings = ComputeSettings(speculative_config="auto", prefix_cache=shares)
        assert bool(scheduler_settings(settings, make_spec()).past_answers_bytes) is shares
