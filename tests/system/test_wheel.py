"""The wheel holds all that `slipstream serve` needs, and serves where nothing else of ours is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
READY = re.compile(r"Slipstream serves demo at (http://\S+)/v1 ")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built beside a copy of it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("common", "services", "models", "web"):
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The programs of an environment that holds the wheel and borrows what it depends on."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    install = ["-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(folder)]
    wheel_alone = ["install", "--no-index", "--no-deps", "--ignore-installed", str(wheel)]
    subprocess.run([sys.executable, *install, *wheel_alone], check=True, capture_output=True)
    return folder / "bin"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder and an environment from which the source tree cannot be found."""
    monkeypatch.chdir(tmp_path)
    for variable in list(os.environ):
        if variable.startswith(("PYTHON", "SLIPSTREAM_")):
            monkeypatch.delenv(variable)


def test_the_wheel_holds_the_packages_and_the_demo_model(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"services/cli.py", "services/launcher/supervisor.py", "common/py.typed"} <= names
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert f"models/demo/{name}" in names
    assert "web/index.html" in page_files() and page_files() <= names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"common", "services", "models", "web"}
    assert not any("training" in name or "tests" in name for name in names)


@pytest.mark.usefixtures("outside")
def test_the_installed_wheel_serves_the_demo_model_and_the_chat_page(installed: Path) -> None:
    where = (
        "import common, services; from services.router.chat_page import PageHandler; "
        "print(len(PageHandler().paths), *common.__path__, *services.__path__)"
    )
    python = [str(installed / "python"), "-c", where]
    ran = subprocess.run(python, check=True, capture_output=True, text=True)
    num_page_files, *folders = ran.stdout.split()
    assert all(folder.startswith(str(installed.parent)) for folder in folders)
    assert int(num_page_files) == len(page_files()) + 1  # the icon has two paths

    command = [str(installed / "slipstream"), "serve", "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            matches = map(READY.match, server.stdout)
            ready = next(filter(None, matches), None)
            assert ready is not None, "the server ended before it was ready"
            asked = {
                "model": "demo",
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
            }
            answer = json.loads(fetched(f"{ready[1]}/v1/chat/completions", asked))
            assert "Paris" in answer["choices"][0]["message"]["content"]
            assert "<html" in fetched(f"{ready[1]}/")
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE_S) == 0
        finally:
            server.kill()


def page_files() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "web").rglob("*.*")}


def fetched(url: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
        return text
