"""A machine without what Triton needs is told so before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.compute.runner.registry import check_toolchain, load_runner


@pytest.fixture(autouse=True)
def no_compiler_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)


def test_any_usual_compiler_will_do() -> None:
    check_toolchain(lambda name: True, {"clang": "/usr/bin/clang"}.get)


def test_a_compiler_named_in_the_environment_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "tcc")
    check_toolchain(lambda name: True, lambda name: None)


def test_without_a_compiler_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="apt install gcc python3-dev"):
        check_toolchain(lambda name: True, lambda name: None)


def test_without_triton_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install triton"):
        check_toolchain(lambda name: False, {"gcc": "/usr/bin/gcc"}.get)


def test_the_device_sim_has_no_drafts() -> None:
    settings = ComputeSettings(device="sim", speculative_config='{"method": "ngram"}')
    with pytest.raises(ConfigError, match="the device sim has no text to guess from"):
        load_runner(Path("nowhere"), settings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "sim"}, "prefill_context_parallel_size: the device sim has no model"),
        ({"tensor_parallel_size": 2}, "cannot have parts .* leave compute.tensor_parallel_size"),
        (
            {"speculative_config": '{"model": "m", "acceptance": "rejection"}'},
            "leave it or compute.prefill_context_parallel_size out",
        ),
    ],
)
def test_what_ranks_that_share_prompts_cannot_be_had_with_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    settings = ComputeSettings(prefill_context_parallel_size=2, **{"device": "cpu", **changes})
    with pytest.raises(ConfigError, match=said):
        load_runner(Path("m"), settings)
