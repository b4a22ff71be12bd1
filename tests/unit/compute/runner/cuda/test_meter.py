"""Launches are compiled by threads and timed in a graph; here both where they stand."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import count

import pytest
import torch

from services.compute.runner.cuda.meter import MIN_CALLS, REPLAYS, GraphMeter
from tests.kernels.host_stream import HostStream


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> GraphMeter:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", HostStream)
    return GraphMeter(HostStream(), torch.device("cpu"))


def test_all_that_may_begin_is_compiled_and_counted(meter: GraphMeter) -> None:
    launched: list[int] = []
    done: list[None] = []
    begins = count()
    begun = meter.compile(
        [partial(launched.append, number) for number in range(5)],
        lambda: next(begins) < 3,
        lambda: done.append(None),
    )
    assert sum(begun) == 3 and len(launched) == 3
    assert len(done) == 5


def test_what_does_not_compile_was_begun_and_takes_forever(meter: GraphMeter) -> None:
    def fails() -> None:
        raise RuntimeError("out of resource: shared memory")

    assert meter.compile([fails], lambda: True, lambda: None) == [True]
    assert meter.seconds([fails]) == float("inf")


def test_every_launch_has_its_turns_in_each_replay(meter: GraphMeter) -> None:
    launched: list[int] = []
    seconds = meter.seconds([partial(launched.append, number) for number in range(4)])
    assert seconds >= 0.0
    replays = 1 + REPLAYS  # and the first is for nothing
    assert launched == [0] + replays * [number % 4 for number in range(MIN_CALLS)]
