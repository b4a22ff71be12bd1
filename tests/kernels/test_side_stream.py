"""Pages go to pinned memory and back on a stream of their own, in one call or run by run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.compute.kv.transfer import PagePairs
from services.compute.runner.cuda.stream import GraphStream, SideStream
from services.compute.step import int32_array

pytestmark = pytest.mark.gpu

OUT = PagePairs(int32_array([7, 2, 3, 4, 0]), int32_array([1, 5, 6, 8, 0]))
BACK = PagePairs(int32_array([8, 0, 5, 6, 1]), int32_array([2, 3, 4, 5, 9]))


@pytest.fixture
def stream() -> Iterator[GraphStream]:
    before = torch.cuda.current_stream()
    yield GraphStream(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


@pytest.mark.parametrize("batched", [True, False])
def test_pages_come_back_as_they_went(stream: GraphStream, batched: bool) -> None:
    side = stream.beside()
    if not batched:
        side._batch = None
    elif side._batch is None:
        pytest.skip("the driver has no batches")
    device = torch.arange(10 * 3000, dtype=torch.float32, device="cuda").view(10, 3, 1000)
    host = torch.zeros(device.shape, pin_memory=True)
    device += 0.0  # the first time takes the host longer than the device sleeps
    before = device.cpu()
    torch.cuda._sleep(400_000_000)  # 0.2 s: what the compute stream does before
    device += 1.0  # and writes last
    there = side.copy_pages(device, host, OUT)
    assert not there.query()
    there.synchronize()
    assert torch.equal(host[OUT.targets], before[OUT.sources] + 1.0)
    device.zero_()
    side.copy_pages(host, device, BACK).synchronize()
    assert torch.equal(device.cpu()[BACK.targets], host[BACK.sources])
    assert not device[[0, 1, 6, 7, 8]].any()
    assert (side._batch is not None) is batched


def test_what_the_driver_refuses_is_copied_run_by_run(stream: GraphStream) -> None:
    class Refusing:
        def copy_pages(self, *arguments: object) -> int:
            return 801

    side: SideStream = stream.beside()
    side._batch = Refusing()
    device = torch.ones(10, 64, device="cuda")
    host = torch.zeros(10, 64, pin_memory=True)
    side.copy_pages(device, host, OUT).synchronize()
    assert host[OUT.targets].all()
    assert side._batch is None
