"""Counters on the device are read without waiting for it."""

from __future__ import annotations

import torch

from services.compute.runner.cuda.device_counters import DeviceCounters
from tests.kernels.host_stream import HostMark, HostStream


class BusyStream(HostStream):
    """Has not passed its marks as long as it is busy."""

    def __init__(self) -> None:
        super().__init__()
        self.is_busy = True

    def mark(self) -> HostMark:
        mark = HostMark()
        mark.query = lambda: not self.is_busy  # type: ignore[method-assign]
        return mark


def test_a_look_reads_what_the_copy_of_an_earlier_one_has_brought() -> None:
    counts = {layer: torch.zeros(2, dtype=torch.int64) for layer in (1, 2)}
    stream = BusyStream()
    counters = DeviceCounters(counts, stream)
    assert counters.layers == (1, 2)
    counts[2].copy_(torch.tensor([3, 1 << 40]))
    for _ in range(2):  # the copy is on its way
        assert counters.read().tolist() == [[0, 0], [0, 0]]
    counts[1] += 7
    stream.is_busy = False
    assert counters.read().tolist() == [[0, 0], [3, 1 << 40]]
    assert counters.read().tolist() == [[7, 7], [3, 1 << 40]]


def test_what_was_on_its_way_at_a_reset_is_forgotten() -> None:
    tokens_X = torch.ones(2, dtype=torch.int64)
    stream = BusyStream()
    counters = DeviceCounters({0: tokens_X}, stream)
    counters.read()
    counters.reset()
    stream.is_busy = False
    assert counters.read().tolist() == [[0, 0]]
    tokens_X += 1
    assert [counters.read().tolist() for _ in range(2)] == [[[0, 0]], [[1, 1]]]
