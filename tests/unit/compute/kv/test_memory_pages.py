"""The page allocator."""

from __future__ import annotations

from array import array

import pytest

from services.compute.kv.memory import PagePool


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
