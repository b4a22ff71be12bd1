"""Real client libraries against a real server, each by a script of its own.

They live in environments of their own, `.venv-clients` and `.venv-agents`, which `make clients`
makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.stack import Stack
from tests.clients import claude_code, codex_cli
from tests.patience import PATIENCE_S
from tests.system.ring import wait_empty
from tests.system.scripted_model import save_scripted_folder

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "tests" / "clients"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
AGENTS = ROOT / ".venv-agents" / "bin" / "python"
NODE_MODULES = CLIENTS / "node" / "node_modules"


def run(stack: Stack, *command: str) -> None:
    """Run a script to its end; then nothing of it is left in the server."""
    done = subprocess.run(
        [*command, "--base-url", stack.url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "no_proxy": "*"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    wait_empty(stack)


def test_openai_of_the_third_major_version(demo_stack: Stack) -> None:
    run(demo_stack, sys.executable, str(CLIENTS / "openai_sdk.py"))


@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-clients; `make clients` makes it")
@pytest.mark.parametrize(
    "script",
    [
        "openai_sdk.py",
        "anthropic_messages.py",
        "litellm_gateway.py",
        "langchain_chat.py",
        "instructor_extract.py",
    ],
)
def test_a_python_client(script: str, demo_stack: Stack) -> None:
    run(demo_stack, str(PYTHON), str(CLIENTS / script))


@pytest.mark.skipif(not AGENTS.exists(), reason="no .venv-agents; `make clients` makes it")
@pytest.mark.parametrize(
    "script",
    [
        "langchain_agent.py",
        "ollama_client.py",
        "openai_agents.py",
        "pydantic_ai_agent.py",
        "smolagents_agents.py",
    ],
)
def test_an_agent_framework(script: str, demo_stack: Stack) -> None:
    run(demo_stack, str(AGENTS), str(CLIENTS / script))


@pytest.mark.skipif(not NODE_MODULES.is_dir(), reason="no node_modules; `make clients` makes them")
@pytest.mark.parametrize("script", ["openai.mjs", "ai_sdk.mjs"])
def test_a_client_of_npm(script: str, demo_stack: Stack) -> None:
    run(demo_stack, "node", str(CLIENTS / "node" / script))


@pytest.mark.skipif(not NODE_MODULES.is_dir(), reason="no node_modules; `make clients` makes them")
def test_claude_code(tmp_path: Path) -> None:
    folder = save_scripted_folder(tmp_path / "scripted", claude_code.script(), 46_000)
    settings = {"compute.num_threads": 1}
    with Stack(folder, "--device", "cpu", "--dtype", "float32", settings=settings) as stack:
        run(stack, sys.executable, str(CLIENTS / "claude_code.py"))


@pytest.mark.skipif(not NODE_MODULES.is_dir(), reason="no node_modules; `make clients` makes them")
def test_codex(tmp_path: Path) -> None:
    folder = save_scripted_folder(tmp_path / "scripted", codex_cli.script(), 65_536)
    options = ("--device", "cpu", "--dtype", "float32", "--served-model-name")
    names = ("scripted", codex_cli.KNOWN_MODEL)
    with Stack(folder, *options, *names, settings={"compute.num_threads": 1}) as stack:
        run(stack, sys.executable, str(CLIENTS / "codex_cli.py"))


@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-clients; `make clients` makes it")
def test_the_example_with_anthropics_client(demo_stack: Stack) -> None:
    command = (str(PYTHON), str(ROOT / "examples" / "anthropic_chat.py"), "--url", demo_stack.url)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    greeting, answer = done.stdout.splitlines()
    assert greeting.startswith("Hello!") and "18" in answer


@pytest.mark.skipif(not NODE_MODULES.is_dir(), reason="no node_modules; `make clients` makes them")
def test_the_example_for_node(demo_stack: Stack, tmp_path: Path) -> None:
    script = tmp_path / "chat.mjs"  # packages are looked for beside the script
    script.write_text((ROOT / "examples" / "chat.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    done = subprocess.run(
        ["node", str(script), "Hello!"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "SLIPSTREAM_URL": f"{demo_stack.url}/v1"},
    )
    assert done.stdout.startswith("Hello!"), done.stderr
