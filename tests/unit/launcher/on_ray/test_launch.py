"""What a launch on Ray says before it reaches a cluster."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from common.config import DEMO_MODEL, ModelSettings
from common.errors import ConfigError
from services.launcher.on_ray.launch import (
    check_address,
    last_address,
    launch_on_ray,
    model_for_nodes,
)
from services.launcher.plan import Counts, make_plan


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_one_sentence_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"not installed here; pip install 'slipstream\[ray\]'"):
        launch_on_ray(make_plan(None, {}, {}, Counts()), {})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_where_no_cluster_answers_one_sentence_says_so(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"nothing answers at {address} "):
        check_address(address)


def test_ray_would_look_where_its_last_cluster_was(tmp_path: Path) -> None:
    assert last_address({"RAY_TMPDIR": str(tmp_path)}) == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert last_address({"RAY_TMPDIR": str(tmp_path)}) == "10.0.0.1:6379"


def test_names_that_only_ray_knows_are_left_to_it() -> None:
    check_address("auto")
    check_address("")


def test_nodes_find_a_folder_by_its_absolute_path_and_the_demo_where_they_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    mine = model_for_nodes(ModelSettings.model_validate({"path": "mine"}))
    assert (mine.path, mine.served_name) == (str(tmp_path / "mine"), ("mine",))
    demo = model_for_nodes(ModelSettings.model_validate({}))
    assert (demo.path, demo.served_name) == (DEMO_MODEL, ("demo",))
    hub = model_for_nodes(ModelSettings.model_validate({"path": "Qwen/Qwen3-0.6B"}))
    assert (hub.path, hub.served_name) == ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B",))
