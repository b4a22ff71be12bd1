"""Ranks start together and end together, whatever happens to one of them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.stack import is_running
from common.errors import EXIT_CONFIG, EXIT_FATAL, FatalError
from services.compute.config import ComputeSettings
from services.compute.runner.group import FollowerGroup
from services.compute.runner.protocol import RunnerSpec
from tests.patience import PATIENCE_S
from tests.unit.compute.runner.stub_follower import BROKEN

STUB = "tests.unit.compute.runner.stub_follower"
ENDS_WITHIN_S = 1.0
BUSY_S = 1.5  # that the test's own machine may add


SPEC = RunnerSpec(
    vocab_size=0, max_model_len=0, eos_token_ids=(), kv_groups=(), num_pages=0, num_host_pages=0,
    max_num_seqs=5, max_step_tokens=0, stall_after_s=5.0,
)  # fmt: skip


class Group(FollowerGroup):
    """A group of stubs, whose end is seen and not made."""

    def __init__(self, does: str = "follows", num_followers: int = 1) -> None:
        self.ends: queue.Queue[tuple[int, float]] = queue.Queue()
        settings = ComputeSettings(tensor_parallel_size=1 + num_followers, max_num_seqs=5)
        super().__init__(Path("/m", does), settings, self._note, STUB)

    def _note(self, status: int) -> None:
        self.ends.put((status, time.monotonic()))

    def ready(self, **changes: Any) -> Group:
        self.wait_until_ready(replace(SPEC, **changes))
        return self

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    def handled(self) -> list[int]:
        return [self._ring.num_handled(follower.rank - 1) for follower in self._followers]

    def call(self, kind: int = 1) -> None:
        self.send(kind, np.arange(9, dtype=np.int32))
        self.sent_is_done()

    def ended_after(self, began_s: float, status: int) -> float:
        found, at_s = self.ends.get(timeout=PATIENCE_S)
        assert found == status
        return at_s - began_s


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_all_ranks_follow_until_one_dies_or_is_stopped() -> None:
    with closing(Group(num_followers=2).ready()) as group:
        for _ in range(100):
            group.call()
        wait_until(lambda: group.handled() == [100, 100])
        assert group.ends.empty()
        began_s = time.monotonic()
        os.kill(group.pids[1], signal.SIGKILL)
        assert group.ended_after(began_s, EXIT_FATAL) < ENDS_WITHIN_S
        began_s = time.monotonic()
        os.kill(group.pids[0], signal.SIGSTOP)  # though nothing is to be done
        assert group.ended_after(began_s, EXIT_FATAL) < ENDS_WITHIN_S + BUSY_S
    assert not any(map(is_running, group.pids))


def test_a_rank_that_does_not_get_on_with_what_another_has_done_ends_the_group() -> None:
    """But not where the host computes, which may have no processor for it."""
    with closing(Group("hangs").ready(overlaps=False)) as group:
        group.call(kind=7)
        time.sleep(ENDS_WITHIN_S)
        assert group.ends.empty()
        group.ready(overlaps=True)
        began_s = time.monotonic()
        assert group.ended_after(began_s, EXIT_FATAL) < ENDS_WITHIN_S + BUSY_S


def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(Group("broken")) as group:
        assert group.ends.get(timeout=PATIENCE_S)[0] == EXIT_CONFIG
    assert f"slipstream compute: {BROKEN}\n" in capfd.readouterr().err


def test_a_rank_that_has_loaded_something_else_is_told() -> None:
    with closing(Group()) as group, pytest.raises(FatalError, match="rank 1 has loaded"):
        group.ready(num_pages=6)


def test_a_start_that_fails_here_does_not_wait_for_those_that_load() -> None:
    group = Group("loads long")
    group.close()
    assert not any(map(is_running, group.pids))


LEADS = """
import sys, time
from pathlib import Path
from services.compute.config import ComputeSettings
from services.compute.runner.group import FollowerGroup
settings = ComputeSettings(tensor_parallel_size=2)
group = FollowerGroup(Path("/m/loads long"), settings, module=sys.argv[1])
print(group._followers[0].process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_rank_outlives_its_leader_nor_waits_for_one_that_is_stopped(number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", LEADS, STUB], stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None
        (pid,) = map(int, leader.stdout.readline().split())
        leader.send_signal(number)
    assert leader.returncode == -signal.SIGKILL
    wait_until(lambda: not is_running(pid))
