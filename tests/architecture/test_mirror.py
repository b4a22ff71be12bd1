"""Unit tests mirror the sources: whoever changes a module finds its tests by its name."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "unit"
TREES = ("common", "benchmarks", "deploy", "models", "tools", "web")  # all else is below services/
# The tests of these folders have names of topics: they test its modules together.
BY_TOPIC = ("services/compute/scheduler", "services/router/openai")
# Tests of no one module.
OTHERS = {
    "tests/unit/compute/models/test_family_models.py": "the models that families are tested with",
    "tests/unit/compute/models/test_family_fields.py": "the fields of all families",
    "tests/unit/compute/models/test_families.py": "every family on a runner",
    "tests/unit/router/test_any_api_input.py": "the requests of all APIs",
    "tests/unit/router/test_tokenizer_contract.py": "what all APIs check for the tokenizer",
    "tests/unit/web/test_scripts.py": "the page's scripts, by the *.test.mjs beside it",
}


def source_folder(test: Path) -> Path:
    """Return the folder that a test's folder mirrors."""
    inner = test.parent.relative_to(UNIT)
    return (
        ROOT / inner if inner.parts[:1] and inner.parts[0] in TREES else ROOT / "services" / inner
    )


def has_source(test: Path) -> bool:
    """Whether there is a module for a test: kv.py for test_kv.py and for test_kv_prefix.py."""
    folder = source_folder(test)
    name = test.stem.removeprefix("test_")
    if folder.is_dir() and str(folder.relative_to(ROOT)) in BY_TOPIC:
        return True
    return any(
        name == path.stem or name.startswith(f"{path.stem}_")
        for path in folder.glob("*")
        if path.suffix == ".py" or (path / "__init__.py").exists()
    )


@cache
def imports(path: Path) -> frozenset[str]:
    """Return what a test imports, by itself and through the helpers of tests."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            helper = ROOT / f"{node.module.replace('.', '/')}.py"
            if node.module.startswith("tests.") and helper.exists():
                names |= imports(helper)
    return frozenset(names)


def uses_its_folder(test: Path) -> bool:
    """Whether a test imports something of the folder that it mirrors, or runs a program there."""
    dotted = ".".join(source_folder(test).relative_to(ROOT).parts)
    program = f"{test.stem.removeprefix('test_')}.py"
    return program in test.read_text() or any(
        name.startswith(f"{dotted}.") for name in imports(test)
    )


def test_every_unit_test_is_named_after_a_module_and_lies_where_that_does() -> None:
    tests = sorted(UNIT.rglob("test_*.py"))
    assert len(tests) > 100
    astray = {
        str(test.relative_to(ROOT))
        for test in tests
        if not (has_source(test) and uses_its_folder(test))
    }
    assert astray == set(OTHERS)
