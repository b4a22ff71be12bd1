"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

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


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def test_every_file_is_short_enough_to_be_read_in_one_go() -> None:
    num_lines = {path: len(text_of(path).splitlines()) for path in SOURCES + OTHERS}
    long = [f"{name_of(path)}: {count}" for path, count in num_lines.items() if count > MAX_LINES]
    assert not long, "\n".join(long)


def test_every_module_begins_with_a_sentence_on_its_purpose() -> None:
    """The `__init__.py` of a package is empty, or that sentence alone."""
    unexplained = []
    for path in SOURCES:
        tree = ast.parse(text_of(path))
        if path.name == "__init__.py":
            is_right = not tree.body or (len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr))
        else:
            is_right = bool(ast.get_docstring(tree))
        if not is_right:
            unexplained.append(name_of(path))
    assert not unexplained, "\n".join(unexplained)


def test_every_file_is_named_after_what_is_in_it() -> None:
    vague = re.compile(r"(utils?|helpers?|misc|common_.*)\.py")
    misnamed = [name_of(path) for path in SOURCES if vague.match(path.name)]
    assert not misnamed, "\n".join(misnamed)


def test_helpers_stand_apart_from_tests() -> None:
    """A test that another file imports would run twice: helpers have modules of their own."""
    imported = [
        f"{name_of(path)}: {name}"
        for path in OTHERS
        for node in ast.walk(ast.parse(text_of(path)))
        for name in imported_names(node)
        if name.startswith("tests.") and ".test_" in name
    ]
    assert imported == []


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return []


def test_forbidden_things_are_nowhere() -> None:
    found = [
        f"{name_of(path)}: {word}: {why}"
        for path in SOURCES + OTHERS
        for word, why in FORBIDDEN.items()
        if word in text_of(path)
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
        name_of(path) for path in SOURCES if re.search(r"os\.(environ|getenv)\b", text_of(path))
    }
    assert readers <= {
        "common/child_process.py",  # what a child inherits
        "common/gguf/folder.py",  # where caches are
        "common/host.py",  # where caches are
        "common/run_dir.py",  # where the session's run-time folder is
        "common/service.py",
        "services/cli.py",
        "services/launcher/on_ray/service_process.py",  # what its node passes on to services
        "services/compute/runner/registry.py",  # CC, which Triton reads
    }


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
