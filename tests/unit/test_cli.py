"""The command's small subcommands, and that a health check is light."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.beacon import BeaconFile, read_beacon
from services.cli import COMMANDS, command_of, main
from tests.patience import PATIENCE_S

COMMANDS_FOLDER = Path(__file__).resolve().parents[2] / "services" / "commands"
HELPERS = {"command", "conversation", "server"}  # modules without commands


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("SLIPSTREAM_"):
            monkeypatch.delenv(variable)


def test_health_follows_the_beacon(tmp_path: Path) -> None:
    beacon = BeaconFile(str(tmp_path), "compute-0")
    asked = ["health", "compute-0", "--run-dir", str(tmp_path)]
    assert main(asked) == 1
    beacon.update(True, time.monotonic())
    assert main(asked) == 0
    os.utime(beacon.path, (1, 1))  # the wall clock was set; nothing hangs
    assert main(asked) == 0
    beacon.update(False, time.monotonic())
    assert main(asked) == 1
    beacon.update(True, time.monotonic() - 10.0, 60.0)
    assert main(asked) == 0
    beacon.remove()
    assert main(asked) == 1


def test_health_takes_what_loads_or_drains_for_live_and_what_hangs_for_dead(tmp_path: Path) -> None:
    asked = ["health", "x", "--run-dir", str(tmp_path), "--live"]
    assert main(asked) == 1
    beacon = BeaconFile(str(tmp_path), "x")
    beacon.update(False, time.monotonic())
    assert main(asked) == 0
    assert main(asked[:-1]) == 1
    beacon.update(True, time.monotonic() - 1000.0)
    assert main(asked) == 1
    beacon.remove()


def test_health_kills_what_hangs_if_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import sys, time; from common.beacon import BeaconFile; "
    program += "beacon = BeaconFile(sys.argv[1], 'x'); "
    program += "beacon.update(True, time.monotonic() - 100.0); input()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        while read_beacon(str(tmp_path), "x") is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        asked = ["health", "x", "--run-dir", str(tmp_path)]
        assert main(asked) == 1
        assert "x hangs: silent for 10" in capsys.readouterr().err
        assert process.poll() is None
        assert main([*asked, "--kill"]) == 1
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert main([*asked, "--kill"]) == 1  # of a dead process nothing is believed, its id least
    assert capsys.readouterr().err.count("hangs") == 1


def test_health_looks_twice_before_it_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was paused has had no turn yet, and is as silent as one that hangs."""
    beacon = BeaconFile(str(tmp_path), "x")
    beacon.update(True, time.monotonic() - 1000.0)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(time, "sleep", lambda seconds: beacon.update(True, time.monotonic()))
    assert main(["health", "x", "--run-dir", str(tmp_path), "--kill"]) == 0
    assert killed == []
    beacon.remove()


def test_health_says_that_the_first_process_of_a_container_cannot_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    BeaconFile(str(tmp_path), "x").update(True, time.monotonic() - 1000.0)
    assert main(["health", "x", "--run-dir", str(tmp_path), "--kill"]) == 1
    assert "run it below an init" in capsys.readouterr().err
    assert killed == []


def test_health_finds_the_run_dir_in_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beacon = BeaconFile(str(tmp_path), "x")
    beacon.update(True, time.monotonic())
    config = tmp_path / "c.toml"
    config.write_text(f'[links]\nrun_dir = "{tmp_path}"\n')
    assert main(["health", "x", "--config", str(config)]) == 0
    monkeypatch.setenv("SLIPSTREAM_LINKS__RUN_DIR", str(tmp_path))
    assert main(["health", "x"]) == 0


def test_health_without_a_run_dir_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "x"]) == 2
    assert "--run-dir" in capsys.readouterr().err


def test_a_health_check_loads_nothing_heavy() -> None:
    program = (
        "import sys; from services.cli import main; main(['health', 'x', '--run-dir', '/']); "
        "print(*{'torch', 'pydantic', 'zmq', 'structlog', 'asyncio', 'opentelemetry'}"
        " & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, "")


def test_keys_are_made_once_and_kept_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["keys", str(folder)]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "stay as they are" in capsys.readouterr().out


def test_incomplete_keys_are_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    main(["keys", str(folder)])
    (folder / "compute.secret").unlink()
    assert main(["keys", str(folder)]) == 2


def test_serve_tells_mistakes_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert capsys.readouterr().err == (
        f"slipstream serve: {tmp_path} has no config.json; is it the folder of a model?\n"
    )


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_the_help_names_every_command_in_80_columns(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    text = capsys.readouterr().out
    modules = {path.stem for path in COMMANDS_FOLDER.glob("*.py")} - {"__init__", *HELPERS}
    found = [importlib.import_module(f"services.commands.{name}").COMMANDS for name in modules]
    assert sorted(COMMANDS) == sorted(name for commands in found for name in commands)
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_in_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["srve"], "slipstream: there is no command srve; did you mean serve?"),
        (["--versio"], "slipstream: there is no option --versio"),
        (["serve", "--max-seqs", "8"], "no option --max-seqs; did you mean --max-num-seqs?"),
        (["serve", "--max_num_batched_tokens=8"], "there is no --max-num-batched-tokens here; use"),
        (["serve", "-c", "4096"], "there is no -c here; use --max-model-len"),
        (["serve", "-m", "x.gguf"], "there is no -m here; give the model without an option"),
        (["serve", "--quantization=awq"], "invalid choice: 'awq' (choose from"),
        (["serve", "-tp", "0"], "should be greater than or equal to 1"),
        (["serve", "--chat-template", "/no/file"], "cannot read /no/file: No such file"),
        (["serve", "demo", "more"], "more: one argument too many"),
        (["keys", "--folder"], "the following arguments are required: DIR"),
    ],
)
def test_a_mistyped_word_gets_a_suggestion(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(words) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 2  # what is wrong, and where to read more


def test_options_that_are_here_are_not_said_to_be_elsewhere() -> None:
    parser = command_of("serve").parser("serve")
    known = {name for action in parser._actions for name in action.option_strings}
    assert not known & set(parser.hints)
    named = {word.strip(",;.)") for text in parser.hints.values() for word in text.split()}
    assert {word for word in named if word.startswith("--")} <= known | {"--config"}
