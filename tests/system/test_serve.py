"""`slipstream serve` from the outside: what it prints works, and nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.stack import Stack, command_line, descendants_of, is_running
from tests.patience import PATIENCE_S
from tests.system.conftest import SimStack
from tests.system.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_in_the_banner_gets_an_answer(sim_stack: Stack) -> None:
    text = sim_stack.log_path.with_name("out").read_text()
    words = shlex.split(text[text.index("curl ") : text.index("Ctrl-C")])
    body = json.loads(words[words.index("-d") + 1]) | {"max_tokens": 8}  # sim answers till the end
    request = urllib.request.Request(
        words[1], json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"


def run_dir_of(stack: Stack) -> Path:
    """Return where a server's inboxes are."""
    (registered, *_) = stack.logged("worker registered")
    return Path(registered["endpoint"].removeprefix("ipc://")).parent


def test_the_folder_of_a_run_is_private_and_goes_with_it(mortal_stack: Stack) -> None:
    run_dir = run_dir_of(mortal_stack)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    health = [sys.executable, "-m", "services.cli", "health", "--run-dir", str(run_dir)]
    assert subprocess.run([*health, "compute-0"], cwd=ROOT).returncode == 0
    assert subprocess.run([*health, "compute-1"], cwd=ROOT).returncode == 1
    assert mortal_stack.stop() == 0
    assert not run_dir.exists()


@pytest.fixture
def own_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of runs lie where no other server of this machine looks; the path has to be short."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.mark.usefixtures("own_runs")
def test_when_the_launcher_is_killed_every_process_ends_and_the_next_start_clears_up(
    sim_folder: Path,
) -> None:
    with SimStack(sim_folder, "--routers", "2") as stack:
        run_dir = run_dir_of(stack)
        left = descendants_of(stack.process.pid)
        assert len(left) >= 5
        stack.signal(signal.SIGKILL)
        stack.wait()
        stack.wait_until(
            lambda: not any(is_running(pid) for pid in left), PATIENCE_S, "all gone", alive=False
        )
    assert run_dir.is_dir()
    hour_ago_s = time.time() - 3600
    for path in (*run_dir.iterdir(), run_dir):
        os.utime(path, (hour_ago_s, hour_ago_s), follow_symlinks=False)
    with SimStack(sim_folder) as stack:
        assert not run_dir.exists()
        removed = stack.logged("removed the folder of a killed run")
        assert str(run_dir) in {line["path"] for line in removed}
        assert stack.stop() == 0


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (
            ("SLIPSTREAM_COMPUTE__MAX_NUM_SEQS", "many"),
            "SLIPSTREAM_COMPUTE__MAX_NUM_SEQS: should be a valid integer",
        ),
        (
            ("SLIPSTREAM_ROUTER__PLACEMENT", "random"),
            "SLIPSTREAM_ROUTER__PLACEMENT: should be",
        ),
        (
            ("SLIPSTREAM_TOKENIZER__POOL_SIZ", "1"),
            "SLIPSTREAM_TOKENIZER__POOL_SIZ: no such setting; did you mean pool_size?",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_named_in_one_line_before_anything_is_started(
    sim_folder: Path, variable: tuple[str, str], said: str
) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "services.cli",
            "serve",
            str(sim_folder),
            "--device=sim",
            "--port=0",
        ],
        cwd=ROOT,
        env={**os.environ, variable[0]: variable[1]},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"slipstream serve: {said}")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        (["--device=cuda"], {}, "--device cuda: "),
        (["--max-model-len=100000"], {}, "the model's positions end at 2048"),
        (["--max-batched-token-mem=1000000000000"], {}, "does not fit into this machine's memory"),
        ([], {"architectures": ["RwkvForCausalLM"]}, "architecture RwkvForCausalLM is not"),
        ([], {"hidden_size": 10**9}, "hidden_size is 1000000000, and no model has more"),
        ([], {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and no model"),
        ([], {"vocab_size": 10**12}, "vocab_size is 1000000000000, and no model has more"),
        ([], {"max_position_embeddings": 10**15}, "max_position_embeddings is 10000000000000"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_nothing_is_started(
    options: list[str], changes: dict[str, object], said: str, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    command = [sys.executable, "-m", "services.cli", "serve", str(folder), "--port=0", *options]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("slipstream serve: ")
    assert said in line
    assert ran.stdout == ""


KEY = "sk-in-plain-sight"


@pytest.fixture(scope="module")
def optioned(sim_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server with a key and a template as options, two computes, and a setting's old name."""
    template = tmp_path_factory.mktemp("templates") / "shout.jinja"
    template.write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    options = ("--api-key", KEY, "--chat-template", str(template), "--tensor-parallel-size", "1")
    old_name = {"compute.guide_at_startup": False}
    with Stack(
        sim_folder, "--device", "sim", "--computes", "2", *options, settings=old_name
    ) as stack:
        yield stack


def test_a_setting_under_its_old_name_is_one_entry_in_the_log_of_several_processes(
    optioned: Stack,
) -> None:
    (entry,) = optioned.logged("deprecated setting; use its new name")
    assert [json.loads(line) for line in optioned.log().splitlines()]  # and nothing but entries
    assert entry["setting"] == "SLIPSTREAM_COMPUTE__GUIDE_AT_STARTUP"
    assert entry["new_name"] == "SLIPSTREAM_COMPUTE__GRAMMAR_AT_STARTUP"
    assert (entry["level"], entry["removed_in"]) == ("warning", "0.2.0")


def test_a_command_says_how_to_give_the_key_that_is_wanted(optioned: Stack) -> None:
    refused = complete(optioned, "-p", "a")
    assert refused.returncode == 1
    assert "(status 401; --api-key gives a key)" in refused.stderr
    taken = complete(optioned, "-p", "a", f"--api-key={KEY}", "--max-tokens=3")
    assert (taken.returncode, taken.stderr) == (0, "")  # the text is any, even blank


def complete(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "complete", stack.url, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_key_given_as_an_option_is_in_no_log_and_no_child_s_command_line(
    optioned: Stack,
) -> None:
    asked = {"messages": [{"role": "user", "content": "low"}], "model": "sim"}
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {KEY}"}, 200)):
        request = urllib.request.Request(
            optioned.url + "/tokenize",
            json.dumps(asked | {"return_token_strs": True}).encode(),
            {"Content-Type": "application/json", **headers},
        )
        with contextlib.suppress(urllib.error.HTTPError):
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                assert (answer.status, status) == (200, 200)
                assert "LOW" in "".join(json.load(answer)["token_strs"])
                continue
        assert status == 401
    for pid in descendants_of(optioned.process.pid):
        assert KEY not in " ".join(command_line(pid))
        assert KEY not in Path(f"/proc/{pid}/environ").read_text()
    assert optioned.stop() == 0
    assert KEY not in optioned.log()


def test_on_a_terminal_lines_are_for_people(sim_folder: Path) -> None:
    with Terminal("serve", str(sim_folder), "--device", "sim", "--port", "0") as terminal:
        before = terminal.expect("Slipstream serves sim at http://127.0.0.1:")
        assert "compute-0     | " in before
        assert "{" not in before
        terminal.expect("Ctrl-C ends it.")
        terminal.type("\x03")
        assert terminal.wait() == 0


def test_it_serves_from_a_folder_that_holds_another_common_package(
    sim_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    program = (
        f"import sys; sys.path[0] = {str(ROOT)!r}; sys.argv[0] = 'slipstream'\n"
        "from services.cli import main\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "serve", str(sim_folder), "--device=sim", "--port=0"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as serving:
        assert serving.stdout is not None
        assert any("Slipstream serves sim" in line for line in serving.stdout)
        serving.send_signal(signal.SIGINT)
    assert serving.returncode == 0
