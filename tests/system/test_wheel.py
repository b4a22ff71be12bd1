"""The wheel holds all that `slipstream serve` needs, the demo model among it, and no more."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def test_the_wheel_holds_the_packages_and_the_demo_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("common", "services", "models", "web"):
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(installed)
    assert {"services/cli.py", "services/launcher/supervisor.py", "common/py.typed"} <= names
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert f"models/demo/{name}" in names
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "web").rglob("*.*")}
    assert "web/index.html" in page and page <= names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"common", "services", "models", "web"}
    served = "from services.router.chat_page import PageHandler; print(len(PageHandler().paths))"
    command = [sys.executable, "-c", served]
    printed = subprocess.run(command, cwd=installed, check=True, capture_output=True, text=True)
    assert int(printed.stdout) == len(page)
    assert not any("training" in name or "tests" in name for name in names)
