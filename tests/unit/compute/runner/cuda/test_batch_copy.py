"""What the driver's function is called with; the copies themselves are tested on a GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from services.compute.kv.transfer import PagePairs
from services.compute.runner.cuda.batch_copy import SIGNATURE, BatchCopy
from services.compute.step import int32_array


def ints(kind: type, address: int, count: int) -> list[int]:
    """What a C array holds."""
    return list((kind * count).from_address(address))


def test_the_driver_gets_targets_before_sources_and_one_set_of_attributes() -> None:
    calls: list[list[int]] = []

    def driver(*arguments: int) -> int:
        *columns, count, attributes, first, num_attributes, _, stream = arguments
        calls.extend(ints(ctypes.c_uint64, column, count) for column in columns)
        calls.append(ints(ctypes.c_int, attributes, 6))
        calls.append([*ints(ctypes.c_size_t, first, 1), num_attributes, stream])
        return 7

    batch = BatchCopy(SIGNATURE(driver), flags=1)
    sources, targets, sizes = (np.array(c, np.uint64) for c in ([3, 4], [1 << 63, 6], [10, 20]))
    assert batch.copy(sources, targets, sizes, 99) == 7
    order_and_flags = [1, 0, 0, 0, 0, 1]
    assert calls == [[1 << 63, 6], [3, 4], [10, 20], order_and_flags, [0, 1, 99]]


def test_pages_are_copied_run_by_run() -> None:
    num_copies = []

    def driver(*arguments: int) -> int:
        *columns, count, _, _, _, _, _ = arguments
        num_copies.append(count)
        for to, first, size in zip(
            *(ints(ctypes.c_uint64, c, count) for c in columns), strict=True
        ):
            ctypes.memmove(to, first, size)
        return 0

    source, target = torch.arange(48.0).view(6, 2, 4), torch.zeros(8, 2, 4)
    pages = PagePairs(int32_array([5, 1, 2, 3]), int32_array([0, 4, 5, 7]))
    assert BatchCopy(SIGNATURE(driver)).copy_pages(source, target, pages, 0) == 0
    assert num_copies == [3]
    assert torch.equal(target[[0, 4, 5, 7]], source[[5, 1, 2, 3]])
    assert not target[[1, 2, 3, 6]].any()


def test_a_machine_without_a_driver_has_no_batches() -> None:
    assert BatchCopy.find("libno-such-driver.so.1") is None
    assert BatchCopy.find("libc.so.6") is None
