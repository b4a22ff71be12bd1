"""The control socket changes counts for its user, and answers nonsense with a sentence."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.launcher.control import ask_control, serve_control
from services.launcher.replicas import ScaleError


class Counted:
    """Replicas that are numbers; there is no room for more detokenizers."""

    def __init__(self) -> None:
        self.counts = {"router": 1, "tokenizer": 1, "compute": 1, "detokenizer": 1}

    def count(self, service: str) -> int:
        return self.counts[service]

    async def scale(self, service: str, count: int) -> None:
        if service == "detokenizer":
            raise ScaleError("there is no room for so many")
        self.counts[service] = count


def asked(path: Path, counts: Mapping[str, int]) -> dict[str, int]:
    async def ask() -> dict[str, int]:
        async with serve_control(str(path), Counted()):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            return await asyncio.to_thread(ask_control, str(path), counts)

    return asyncio.run(ask())


def test_counts_are_changed_and_told(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    counts = {"router": 1, "tokenizer": 1, "compute": 4, "detokenizer": 1}
    assert asked(path, {"computes": 4}) == counts
    assert not path.exists()


@pytest.mark.parametrize(
    ("counts", "complaint"),
    [
        ({"detokenizer": 2}, "there is no room for so many"),
        ({"computer": 2}, "there is no service 'computer'; did you mean compute"),
        ({"tokenizer": 0}, "tokenizer: from 1 to 256 are possible, not 0"),
        ({"compute": 257}, "compute: from 0 to 256 are possible, not 257"),
        ({"compute": "many"}, "the question should be a line such as"),
        ({"x" * 5000: 1}, "limit"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_changes(
    tmp_path: Path, counts: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ScaleError, match=complaint):
        asked(tmp_path / "control.sock", counts)


def test_where_nobody_listens_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match=f"no answer from {tmp_path}/x: .*No such file"):
        ask_control(f"{tmp_path}/x", {})
