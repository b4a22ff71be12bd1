"""The import contracts hold, and each of them would notice a violation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PLANTED = {
    "services/router/planted.py": "import services.tokenizer.config\n",
    "services/launcher/planted.py": "import services.detokenizer.config\n",
    "services/commands/planted.py": "import services.router.config\n",
    "common/planted.py": "import services.router.config\nimport pickle\n",
    "services/detokenizer/planted.py": "import torch\n",
    "services/compute/kv/memory.py": "import torch\n",  # reaches the scheduler indirectly
    "services/compute/grammar/backend.py": "import zmq\n",
    "services/compute/kernels/planted.py": "import services.compute.engine\n",
    "common/telemetry/trace.py": "import common.telemetry.log\n",
    "common/telemetry/log.py": "import common.telemetry.trace\n",
}


def verdicts(folder: Path) -> dict[str, str]:
    """Run the linter; returns KEPT or BROKEN by contract."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
    )
    found = {}
    for line in ran.stdout.splitlines():
        for verdict in ("KEPT", "BROKEN"):
            name, separator, _ = line.partition(f" {verdict}")
            if separator:
                found[name] = verdict
    assert found, ran.stdout + ran.stderr
    return found


def test_every_contract_is_kept() -> None:
    assert set(verdicts(ROOT).values()) == {"KEPT"}


@pytest.mark.timeout(300)
def test_every_contract_notices_a_planted_violation(tmp_path: Path) -> None:
    for name in ("common", "services"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, text in PLANTED.items():
        target = tmp_path / path
        before = target.read_text() if target.exists() else ""
        target.write_text(before + "\n" + text)
    assert set(verdicts(tmp_path).values()) == {"BROKEN"}


def test_the_cpu_needs_no_triton() -> None:
    """`make serve` without a GPU installs none."""
    modules = ("runner.eager", "runner.follower", "runner.leader", "distributed.gloo")
    imports = "; ".join(f"import services.compute.{module}" for module in modules)
    program = f"import sys; sys.modules['triton'] = None; {imports}"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
