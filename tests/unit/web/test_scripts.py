"""The page's modules that need no browser, by the test runner of node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from array import array
from pathlib import Path

import pytest

from common.link.codec import pack
from common.messages.queries import StagePart, Timeline, Track, TrackArg

HERE = Path(__file__).parent
STATIC = Path(__file__).resolve().parents[3] / "web"
SOURCES = sorted(path for path in STATIC.rglob("*") if path.is_file())
NODE = shutil.which("node")
MIN_NODE = 20
MAX_LINES = 400


def column(*values: float) -> array[float]:
    return array("d", values)


def packed_timeline() -> bytes:
    """Two processes of one host, whose clocks are 10 s behind Unix time."""
    nan = float("nan")
    tokenize = Track("prompts", "tokenize", column(1.0, 4.0625), column(1.125, 4.1875))
    prefill = TrackArg("prefill_tokens", column(0, 7, 0))
    step = Track("device", "step", column(nan, 4.25, 4.5), column(nan, 4.5, 4.625), (prefill,))
    compute = StagePart("compute", "compute-0", 10.0, (step,))
    return pack(Timeline((compute, StagePart("tokenizer", "tokenizer-0", 10.03125, (tokenize,)))))


def node_version() -> int:
    assert NODE is not None
    said = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.strip().removeprefix("v").split(".")[0])


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("path", sorted(HERE.glob("*.test.mjs")), ids=lambda path: path.name)
def test_the_modules_do_what_their_tests_say(path: Path) -> None:
    if node_version() < MIN_NODE:
        pytest.skip(f"node is older than {MIN_NODE}")
    assert NODE is not None
    ran = subprocess.run(
        [NODE, "--test", str(path)],
        env={**os.environ, "SLIPSTREAM_TIMELINE": packed_timeline().hex()},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_file_of_the_page_is_short_and_asks_nobody_else(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    for forbidden in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://"):
        assert forbidden not in text
    assert "http://" not in re.sub(r"http://www\.w3\.org/(2000/svg|1998/Math/MathML)", "", text)
    assert " style=" not in text and " onclick" not in text
