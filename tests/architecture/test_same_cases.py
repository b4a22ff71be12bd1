"""Every run tries the same cases: nothing in the tests is drawn without a seed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if "node_modules" not in path.parts)

# Prints what a few examples of hypothesis and of schemathesis are made of.
DRAW = """
import sys
import tests.cases
for name in sys.argv[1:]:
    __import__(name)
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies as st
from services.router.openapi.document import build_document

operation = schemathesis.openapi.from_dict(build_document("0"))["/tokenize"]["post"]

@settings(max_examples=100)
@given(st.tuples(st.integers(), st.text(), st.floats()))
def draw(drawn):
    print(drawn)

@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(operation.as_strategy())
def ask(case):
    print(case.body)

draw()
ask()
"""
MODULES = ("services.router.actor", "services.tokenizer.actor")  # full of constants

# Callables that draw from nowhere; what has a seed or a generator of its own is not among them.
UNSEEDED = {
    "random": {"random", "randint", "randrange", "choice", "choices", "shuffle", "sample"},
    "np.random": {"rand", "randn", "randint", "random", "choice", "shuffle", "permutation"},
    "torch": {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"},
    "secrets": {"randbelow", "choice", "token_hex", "token_bytes"},
    "os": {"urandom"},
    "uuid": {"uuid4"},
}
SEEDED_BY_AN_ARGUMENT = {("", "Random"), ("random", "Random"), ("np.random", "default_rng")}


def draws(path: Path) -> Iterator[str]:
    """Find calls that draw at random without a seed; a file may have one for torch's own state."""
    text = path.read_text()
    tree = ast.parse(text)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        is_seeded = any(keyword.arg == "generator" for keyword in node.keywords) or (
            module == "torch" and "torch.manual_seed(" in text
        )
        is_module = module.partition(".")[0] in imported  # `random` may be a Random of the test's
        without_seed = (module, name) in SEEDED_BY_AN_ARGUMENT and not node.args
        if without_seed or (is_module and name in UNSEEDED.get(module, ()) and not is_seeded):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:60]}"


def test_nothing_is_drawn_without_a_seed() -> None:
    assert [found for path in TESTS for found in draws(path)] == []


def test_generated_cases_are_the_same_in_every_process() -> None:
    assert drawn("0") == drawn("1", *MODULES)


def drawn(hash_seed: str, *modules: str) -> str:
    """Return the cases of a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRAW, *modules]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 110
    return done.stdout
