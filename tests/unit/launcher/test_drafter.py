"""The model that is to draft is found where the server is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError, ModelError
from services.launcher.drafter import with_drafter
from services.launcher.plan import Counts, Plan, make_plan


def plan_with(config: str) -> Plan:
    options = {"compute": {"speculative_config": config}}
    return make_plan(None, {}, options, Counts())


def test_a_drafter_is_taken_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    for name in ("config.json", "model.safetensors"):
        (small / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    plan = with_drafter(plan_with('{"model": "./small", "num_speculative_tokens": 2}'))
    config = json.loads(plan.value("compute", "speculative_config"))
    assert config == {"model": str(small), "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    "config", ["off", "auto", '{"method": "ngram"}', '{"model": "[ngram]"}', '{"method": "mtp"}']
)
def test_settings_without_a_model_stay_as_they_are(config: str) -> None:
    plan = plan_with(config)
    assert with_drafter(plan) is plan


def test_a_drafter_that_is_not_there_is_said_to_be_one() -> None:
    with pytest.raises(ModelError, match="--speculative-config: there is no folder ./nothing"):
        with_drafter(plan_with('{"model": "./nothing"}'))


def test_a_plan_with_its_drafter_may_be_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")

    def refuse(plan: Plan) -> None:
        assert json.loads(plan.value("compute", "speculative_config"))["model"] == str(tmp_path)
        raise ConfigError("too large")

    with pytest.raises(ConfigError, match="^too large$"):
        with_drafter(plan_with(json.dumps({"model": str(tmp_path)})), refuse)
