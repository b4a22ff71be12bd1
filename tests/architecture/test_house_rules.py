"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for name in ("common", "services") for path in (ROOT / name).rglob("*.py"))
OTHERS = sorted(
    path
    for name in ("tests", "benchmarks", "examples", "tools", "deploy", "models")
    for path in (ROOT / name).rglob("*.py")
)
MAX_LINES = 400

# Spelt in two halves, so that this file does not contain them.
FORBIDDEN = {
    "unittest" + ".mock": "tests use real objects or small doubles of a protocol",
    "Magic" + "Mock": "tests use real objects or small doubles of a protocol",
    "trust_remote" + "_code": "no code comes out of a model folder",
    "torch" + ".load(": "weights are safetensors",
    "TO" + "DO": "what is missing belongs into an issue",
    "FIX" + "ME": "what is missing belongs into an issue",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES + OTHERS, ids=name_of)
def test_a_file_is_short_enough_to_be_read_in_one_go(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_begins_with_a_sentence_on_its_purpose(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.name == "__init__.py":
        assert all(isinstance(node, ast.Expr) for node in tree.body), "is empty or one docstring"
        assert len(tree.body) <= 1
    else:
        assert ast.get_docstring(tree)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_is_named_after_what_is_in_it(path: Path) -> None:
    assert not re.match(r"(utils?|helpers?|misc|common_.*)\.py", path.name)


def test_tests_are_shown_by_their_own_file() -> None:
    """What is imported under a test's name runs here and fails there: inherit a class of tests."""
    imported = [
        f"{name_of(path)}: {alias.name}"
        for path in OTHERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("test_")
    ]
    assert imported == []


def test_forbidden_things_are_nowhere() -> None:
    found = [
        f"{name_of(path)}: {word}: {why}"
        for path in SOURCES + OTHERS
        for word, why in FORBIDDEN.items()
        if word in path.read_text()
    ]
    assert found == []


def test_every_service_has_the_same_inner_shape() -> None:
    for service in ("router", "tokenizer", "compute", "detokenizer"):
        folder = ROOT / "services" / service
        present = {path.name for path in folder.iterdir()}
        assert {"__main__.py", "config.py", "actor.py", "README.md"} <= present


def test_the_environment_is_read_in_one_place() -> None:
    """Settings come through `common.config`; who starts processes passes the environment on."""
    readers = {
        name_of(path) for path in SOURCES if re.search(r"os\.(environ|getenv)\b", path.read_text())
    }
    assert readers <= {
        "common/run_dir.py",  # where the session's run-time folder is
        "common/service.py",
        "services/cli.py",
        "services/compute/grammar/process.py",
        "services/compute/runner/cuda/toolchain.py",  # CC, which Triton reads
        "services/tokenizer/process.py",
        "services/tokenizer/worker.py",
    }
