"""The page allocator."""

from __future__ import annotations

from array import array

import pytest

from services.compute.kv.memory import KVMemory, PagePool
from tests.unit.compute.fake_device import make_groups


def test_pages_are_handed_out_once_until_they_come_back() -> None:
    pool = PagePool(4)
    first = pool.take(3)
    assert first is not None
    assert len(set(first)) == 3
    (last,) = set(range(4)).difference(first)
    assert pool.take(2) is None
    assert pool.num_free == 1
    pool.give_back(first[1])
    assert sorted(pool.take(2) or []) == sorted([first[1], last])
    assert pool.num_free == 0


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = PagePool(2)
    assert pool.take(3) is None
    assert pool.num_free == 2


def test_taking_no_pages_always_works() -> None:
    assert PagePool(0).take(0) == array("i")


def test_a_page_freed_twice_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.take(1)
    assert pages is not None
    pool.give_back(pages[0])
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.give_back(pages[0])


def test_a_negative_number_of_pages_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(-1)


def test_a_leased_page_is_handed_out_again_when_its_lease_has_ended() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    assert pages is not None
    pool.lease(pages, arriving=False)
    assert (pool.num_read, pool.num_returned) == (2, 0)
    pool.give_back(pages[0])
    assert (pool.num_free, pool.num_read, pool.num_returned) == (1, 1, 1)
    assert not pool.is_used(pages[0])
    assert pool.take(2) is None
    pool.end_lease(pages)
    assert (pool.num_free, pool.num_read, pool.num_returned) == (2, 0, 0)
    assert pool.is_used(pages[1])
    pool.give_back(pages[1])
    assert pool.num_free == 3


def test_the_last_of_several_leases_frees_a_page() -> None:
    pool = PagePool(1)
    pages = pool.take(1)
    assert pages is not None
    pool.lease(pages, arriving=True)
    pool.lease(pages, arriving=False)
    pool.give_back(pages[0])
    pool.end_lease(pages)
    assert pool.take(1) is None
    pool.end_lease(pages)
    assert pool.take(1) == pages


def test_a_leased_page_is_given_back_once() -> None:
    pool = PagePool(1)
    pages = pool.take(1)
    assert pages is not None
    pool.lease(pages, arriving=False)
    pool.give_back(pages[0])
    with pytest.raises(RuntimeError, match="page 0 is freed twice"):
        pool.give_back(pages[0])


def test_pages_that_are_read_are_not_available_and_what_is_written_is_its_owners() -> None:
    memory = KVMemory(6, 0, make_groups((0,)))
    pages = memory.take(5)
    assert pages is not None
    memory.device.lease(pages[:2], arriving=False)
    memory.device.lease(pages[2:4], arriving=True)
    assert (memory.num_available, memory.num_expected) == (0, 1)
    for page in pages[1:3]:
        memory.device.give_back(page)
    assert (memory.num_available, memory.num_expected) == (0, 3)
    memory.device.end_lease(pages[:2])
    assert (memory.num_available, memory.num_expected) == (2, 3)
    memory.device.end_lease(pages[2:4])
    assert (memory.num_available, memory.num_expected) == (3, 3)
