"""The prefix tree and the tables that share pages through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.compute.kv.memory import KVGroup, KVMemory
from services.compute.kv.page_table import PageTable
from tests.unit.compute.memory_check import check_memory

PAGE_TOKENS = 2
GROUPS = (KVGroup("full", 1, PAGE_TOKENS, 1),)


def key_of(text: str) -> Callable[[int], bytes]:
    """The page keys of a text of two-letter pages."""
    return lambda index: text[PAGE_TOKENS * index : PAGE_TOKENS * (index + 1)].encode()


def keys_of(key: Callable[[int], bytes]) -> Callable[[int, int], Iterator[bytes]]:
    """The keys of a range of pages."""
    return lambda first, last: map(key, range(first, last))


def written(memory: KVMemory, text: str, salt: str = "") -> PageTable:
    """A table that has found, computed and published all of a text."""
    table = PageTable(memory.kinds[0], salt)
    key = key_of(text)
    found = table.find(keys_of(key), len(text) // PAGE_TOKENS)
    start = PAGE_TOKENS * table.num_hit(found)
    table.adopt(table.select(found, start), start)
    assert table.grow(len(text), start)
    table.publish(keys_of(key), len(text))
    return table


def found(memory: KVMemory, text: str, salt: str = "") -> int:
    """How many pages of a text the tree knows."""
    table = PageTable(memory.kinds[0], salt)
    return table.num_hit(table.find(keys_of(key_of(text)), len(text) // PAGE_TOKENS))


def test_only_full_pages_are_shared() -> None:
    memory = KVMemory(8, 0, GROUPS)
    table = written(memory, "abcde")
    assert len(table.pages) == 3
    assert len(table.nodes) == 2
    assert found(memory, "abcde") == 2


def test_pages_are_found_by_all_the_tokens_before_them() -> None:
    memory = KVMemory(8, 0, GROUPS)
    written(memory, "abcd")
    assert found(memory, "abcdef") == 2
    assert found(memory, "abxxcd") == 1
    assert found(memory, "cd") == 0


def test_salts_never_share_pages() -> None:
    memory = KVMemory(8, 0, GROUPS)
    written(memory, "abcd", salt="one")
    assert found(memory, "abcd", salt="two") == 0
    assert found(memory, "abcd") == 0
    assert found(memory, "abcd", salt="one") == 2


def test_two_tables_share_one_page_and_both_must_let_go_before_it_can_be_evicted() -> None:
    memory = KVMemory(4, 0, GROUPS)
    first, second = written(memory, "abcd"), written(memory, "abcd")
    assert first.pages == second.pages
    assert memory.num_available == 2
    first.release()
    assert memory.num_available == 2
    second.release()
    assert memory.num_available == 4


def test_before_the_launch_a_page_that_another_has_published_is_left_as_it_is() -> None:
    memory = KVMemory(8, 0, GROUPS)
    table = PageTable(memory.kinds[0], "")
    table.grow(6, 0)
    own = table.pages[:]
    other = written(memory, "abcd")
    key = key_of("abcdef")
    assert table.publish(keys_of(key), 6, launched=False) == []
    assert (table.pages, table.nodes) == (own, [])
    assert len(table.publish(keys_of(key), 6)) == 3
    assert list(table.pages) == [*other.pages, own[2]]
    check_memory(memory, [table, other])


def test_a_search_goes_on_from_where_the_last_one_ended() -> None:
    memory = KVMemory(8, 0, GROUPS)
    first = written(memory, "abcd")
    key, looked_up = key_of("abcdefgh"), []

    def counting_key(index: int) -> bytes:
        looked_up.append(index)
        return key(index)

    searching = PageTable(memory.kinds[0], "")
    (nodes,) = searching.find(keys_of(counting_key), 4)
    assert (len(nodes), looked_up) == (2, [0, 1, 2])
    longer = written(memory, "abcdef")
    (nodes,) = searching.find(keys_of(counting_key), 4, [nodes])
    assert ([node.page for node in nodes], looked_up) == (list(longer.pages), [0, 1, 2, 2, 3])
    longer.release()
    memory.flush()
    (nodes,) = searching.find(keys_of(counting_key), 4, [nodes])
    assert ([node.page for node in nodes], looked_up[5:]) == (list(first.pages), [2])


def test_a_page_computed_twice_is_kept_once() -> None:
    memory = KVMemory(8, 0, GROUPS)
    first, second = PageTable(memory.kinds[0], ""), PageTable(memory.kinds[0], "")
    for table in (first, second):
        table.grow(4, 0)
        table.num_sent = 2
    assert set(first.pages).isdisjoint(second.pages)
    key = key_of("abcd")
    first.publish(keys_of(key), 4)
    assert first.num_sent == 2
    second.publish(keys_of(key), 4)
    assert second.pages == first.pages
    assert second.num_sent == 0, "the device must hear of the other pages"
    assert memory.device.num_free == 6
    check_memory(memory, [first, second])


def test_the_least_recently_used_pages_go_first_and_leaves_before_what_they_hang_on() -> None:
    memory = KVMemory(4, 0, GROUPS)
    old, new = written(memory, "abcd"), written(memory, "wxyz")
    old.release()
    new.release()
    written(memory, "abcd").release()  # used again: now the other one is older
    assert memory.take(1) is not None
    assert (found(memory, "abcd"), found(memory, "wxyz")) == (2, 1)
    assert memory.take(1) is not None
    assert (found(memory, "abcd"), found(memory, "wxyz")) == (2, 0)


def test_held_pages_are_never_evicted() -> None:
    memory = KVMemory(2, 0, GROUPS)
    table = written(memory, "abcd")
    assert memory.take(1) is None
    assert found(memory, "abcd") == 2
    table.release()
    assert memory.take(2) is not None


def test_an_untrusted_page_is_not_found_again_and_is_freed_by_its_last_holder() -> None:
    memory = KVMemory(8, 0, GROUPS)
    first, second = written(memory, "abcd"), written(memory, "abcdef")
    first.distrust()
    assert found(memory, "abcdef") == 0
    check_memory(memory, [first, second])
    first.release()
    assert memory.device.num_free == 8 - 3
    second.release()
    assert memory.device.num_free == 8


def test_nothing_is_published_below_an_untrusted_page() -> None:
    memory = KVMemory(8, 0, GROUPS)
    table = written(memory, "abcd")
    table.distrust()
    table.grow(6, 0)
    assert table.publish(keys_of(key_of("abcdef")), 6) == []
    table.release()
    assert memory.device.num_free == 8


def test_flushing_forgets_everything_that_nobody_holds() -> None:
    memory = KVMemory(8, 0, GROUPS)
    written(memory, "abcd", salt="x").release()
    held = written(memory, "ab")
    assert memory.flush() == 2
    assert memory.device.num_free == 7
    assert found(memory, "abcd", salt="x") == 0
    assert found(memory, "ab") == 1
    held.release()


def test_a_table_that_cannot_grow_is_left_as_it_was() -> None:
    memory = KVMemory(2, 0, GROUPS)
    table = PageTable(memory.kinds[0], "")
    assert table.grow(3, 0)
    pages = table.pages[:]
    assert not table.grow(5, 0)
    assert table.pages == pages
    assert table.grow(4, 0)
