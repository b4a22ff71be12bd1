"""Launches are compiled ahead and timed in a graph; here where they stand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from services.compute.runner.cuda import meter as meters
from services.compute.runner.cuda.meter import MIN_CALLS, REPLAYS, GraphMeter
from tests.kernels.host_stream import HostStream


class FakeKernels:
    """Of each launch a kernel that it returns."""

    def __init__(self, device: torch.device) -> None:
        self._noted: list[SimpleNamespace] = []

    def note(self, launch: Callable[[], str]) -> list[SimpleNamespace]:
        if launch() == "noted before":
            return []
        self._noted.append(SimpleNamespace(is_begun=False))
        return self._noted[-1:]

    def load(self, may_begin: Callable[[], bool], done: Callable[[], object]) -> None:
        for kernel in self._noted:
            kernel.is_begun = may_begin()
            done()


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> GraphMeter:
    monkeypatch.setattr(meters, "Kernels", FakeKernels)
    return GraphMeter(HostStream(), torch.device("cpu"))


def test_launches_whose_kernels_were_begun_in_time_are_told(meter: GraphMeter) -> None:
    begins = iter([True, True, False])
    launches = [lambda: "new", lambda: "noted before", lambda: "new", lambda: "new"]
    done: list[None] = []
    begun = meter.compile(launches, lambda: next(begins), lambda: done.append(None))
    assert begun == [True, True, True, False]
    assert len(done) == 3


def test_what_cannot_be_launched_takes_forever(meter: GraphMeter) -> None:
    def fails() -> None:
        raise RuntimeError("out of resource: shared memory")

    assert meter.compile([fails, lambda: "new"], lambda: True, lambda: None) == [True, True]
    assert meter.seconds([fails]) == float("inf")


def test_every_launch_has_its_turns_in_each_replay(meter: GraphMeter) -> None:
    launched: list[int] = []
    seconds = meter.seconds([partial(launched.append, number) for number in range(4)])
    assert seconds >= 0.0
    replays = 1 + REPLAYS  # and the first is for nothing
    assert launched == [0] + replays * [number % 4 for number in range(MIN_CALLS)]
