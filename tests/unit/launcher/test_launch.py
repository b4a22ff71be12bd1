"""A launch keeps its settings private, and tells how to begin."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.launcher.launch import banner, write_settings


def test_the_settings_of_a_run_are_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "slipstream.toml"
    write_settings(str(path), 'api_keys = ["secret"]\n')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="cannot write .*File exists"):
        write_settings(str(path), "")


def test_the_banner_has_a_command_that_can_be_copied() -> None:
    text = banner("http://127.0.0.1:8000", "demo", 2.34, needs_key=False)
    assert "http://127.0.0.1:8000/v1 (ready after 2.3 s)" in text
    assert '"model": "demo"' in text
    assert "Authorization" not in text
    assert "Bearer YOUR_KEY" in banner("http://h:1", "demo", 1.0, needs_key=True)


def test_the_banner_of_a_model_that_makes_embeddings_asks_for_one() -> None:
    text = banner("http://127.0.0.1:8000", "bge", 1.0, needs_key=False, embeds=True)
    assert "curl http://127.0.0.1:8000/v1/embeddings" in text and '"input": "What' in text
    assert "chat" not in text


def test_the_banner_names_the_program_as_the_shell_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [".venv/bin/slipstream", "serve"])
    serving = ("http://127.0.0.1:8000", "demo", 1.0, False)
    assert "In a terminal: .venv/bin/slipstream chat\n" in banner(*serving)
    (tmp_path / "slipstream").touch(mode=0o755)
    assert "In a terminal: slipstream chat\n" in banner(*serving)
