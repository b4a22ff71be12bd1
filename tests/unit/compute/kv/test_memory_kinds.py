"""Kinds of cache: which groups can share a pool, what a window keeps, finds and gives back."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.kv.memory import KVMemory
from services.compute.kv.page_table import PageTable, PageTables, make_table
from services.compute.kv.prefix_tree import Node
from tests.unit.compute.fake_device import make_groups
from tests.unit.compute.memory_check import check_memory, findable_nodes, tables_of

PAGE_TOKENS = 2
TEXT = b"abcdefghijklmnopqrstuvwx"


def make_memory(windows: Sequence[int], num_pages: int = 60) -> KVMemory:
    """Memory with pages of two tokens."""
    return KVMemory(num_pages, 0, make_groups(windows, PAGE_TOKENS))


def keys(first: int, last: int) -> Iterator[bytes]:
    """The keys of pages of the text."""
    return (TEXT[PAGE_TOKENS * i : PAGE_TOKENS * (i + 1)] for i in range(first, last))


def written(memory: KVMemory, num_tokens: int, chunk: int = 4) -> PageTable | PageTables:
    """A table that has computed and published so much of the text, in chunks."""
    table = make_table(memory, "")
    for start in range(0, num_tokens, chunk):
        assert table.grow(min(start + chunk, num_tokens), start)
        table.publish(keys, min(start + chunk, num_tokens))
    table.drop(num_tokens)
    return table


def num_hit(memory: KVMemory, num_pages: int) -> int:
    """How much of the text would be found, in pages."""
    table = make_table(memory, "")
    return table.num_hit(table.find(keys, num_pages))


def path(memory: KVMemory, kind: int = 0) -> list[Node]:
    """The nodes of the text, from the first on."""
    nodes = findable_nodes(memory.kinds[kind].tree)
    return sorted(nodes, key=lambda node: str(node.key))


def test_groups_of_the_same_window_move_in_lockstep() -> None:
    memory = make_memory((8, 0, 8, 4, 0))
    assert [(kind.span, kind.groups.tolist()) for kind in memory.kinds] == [
        (FULL, [1, 4]),
        (AttentionSpan.window(8), [0, 2]),
        (AttentionSpan.window(4), [3]),
    ]


def test_a_kind_to_come_is_refused_by_name() -> None:
    (group,) = make_groups((0,))
    with pytest.raises(ValueError, match="'state' are not supported yet"):
        KVMemory(8, 0, [replace(group, kind="state")])


def test_latents_are_kept_for_as_long_as_keys_and_values_are() -> None:
    (group,) = make_groups((0,))
    (kind,) = KVMemory(8, 0, [replace(group, kind="mla")]).kinds
    assert kind.span == FULL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_tokens": 8}, "page_tokens"),
        ({"page_bytes": 8}, "page_bytes"),
        ({"span": AttentionSpan.window(8)}, "'full' has a AttentionSpan"),
        ({"kind": "window"}, "'window' has a AttentionSpan"),
    ],
)
def test_groups_that_cannot_share_a_pool_are_refused(
    changes: dict[str, object], message: str
) -> None:
    first, second = make_groups((0, 0))
    with pytest.raises(ValueError, match=message):
        KVMemory(8, 0, [first, replace(second, **changes)])  # type: ignore[arg-type]


def test_what_left_the_window_is_released_but_for_one_position_that_may_be_computed_again() -> None:
    memory = make_memory((5,))
    table = written(memory, 11)
    (only,) = tables_of(table)
    assert only.first == 3, "position 10 sees 6 and what follows"
    table.drop(12)
    assert only.first == 3, "position 11 may be computed again, and sees 7"
    assert table.grow(13, 13)
    table.publish(keys, 13)
    table.drop(13)
    assert only.first == 4


def test_a_window_shorter_than_a_page_keeps_the_page_below_which_the_next_is_published() -> None:
    memory = make_memory((1,))
    table = written(memory, 12)
    assert [len(part.nodes) for part in tables_of(table)] == [2]
    assert num_hit(memory, 6) == 6


def test_pages_that_left_the_window_are_found_until_they_are_evicted() -> None:
    memory = make_memory((4,), num_pages=12)
    written(memory, 20)
    assert memory.num_available == 12 - 2
    assert [num_hit(memory, pages) for pages in (4, 10)] == [4, 10]
    assert memory.take(memory.device.num_free + 4) is not None
    assert [num_hit(memory, pages) for pages in (1, 4, 5, 6, 10)] == [0, 0, 0, 6, 10]


def test_an_evicted_page_of_one_kind_shortens_the_hit_of_all() -> None:
    memory = make_memory((0, 4))
    table = written(memory, 20, chunk=20)
    table.release()
    full, window = memory.kinds
    assert num_hit(memory, 10) == 10
    assert full.tree.evict(3) == 3  # the deepest
    assert num_hit(memory, 10) == 7
    window.tree.evict(2)  # those that left the window first, the deepest of them: 6 and 7
    assert num_hit(memory, 10) == 6
    check_memory(memory, [])


def test_a_page_that_is_computed_again_takes_the_place_of_an_evicted_one() -> None:
    memory = make_memory((4,), num_pages=20)
    table = written(memory, 20, chunk=2)
    memory.kinds[0].tree.evict(3)
    assert [node.page >= 0 for node in path(memory)] == [False] * 3 + [True] * 7
    again = written(memory, 8)
    assert num_hit(memory, 3) == 3
    check_memory(memory, [table, again])


def test_a_path_that_lost_all_its_pages_is_forgotten() -> None:
    memory = make_memory((4,))
    written(memory, 20, chunk=2).release()
    assert memory.flush() == 10
    assert path(memory) == []
    assert memory.kinds[0].tree._roots == {}


def test_what_was_distrusted_stays_so_when_it_has_left_the_window() -> None:
    memory = make_memory((4,))
    table, other = written(memory, 8), written(memory, 8)
    other.distrust()
    assert table.grow(16, 8)
    assert table.grow(20, 16)
    assert table.nodes == []
    assert [tip.detached for tip in table.tips] == [True]
    assert table.publish(keys, 20) == []
    check_memory(memory, [table, other])


def test_to_distrust_a_sequence_is_to_distrust_what_it_has_left_behind() -> None:
    memory = make_memory((4,))
    table = written(memory, 20)
    assert num_hit(memory, 2) == 2
    table.distrust()
    assert num_hit(memory, 2) == 0
    check_memory(memory, [table])


def test_pages_of_all_kinds_are_evicted_in_one_order() -> None:
    memory = make_memory((0, 3, 3), num_pages=100)
    first = written(memory, 6, chunk=6)
    first.release()
    other = make_table(memory, "other")
    assert other.grow(6, 0)
    other.publish(keys, 6)
    other.release()
    num_evictable = memory.num_available - memory.device.num_free
    assert num_evictable == 2 * 3 * 3
    memory.take(memory.device.num_free + 9)
    found = [num_hit(memory, 3), other.num_hit(other.find(keys, 3))]
    assert found == [0, 3]


def test_pages_swapped_in_without_those_before_them_are_found_again() -> None:
    memory = make_memory((4,))
    table = written(memory, 20)
    table.release()
    memory.flush()
    found = table.find(keys, 9)
    table.adopt(table.select(found, 19), 19)
    assert table.reserve(20, 20)
    pages = table.swapped_pages(19)
    assert table.restored(19, array("i", [7, 8])) == (array("i", [7, 8]), pages)
    with pytest.raises(RuntimeError, match="3 pages were swapped out, 2 come back"):
        table.restored(19, array("i", [7, 8, 9]))
    assert len(table.publish(keys, 20)) == 2
    assert [node.page >= 0 for node in path(memory)] == [False] * 8 + [True] * 2
    assert [num_hit(memory, pages) for pages in (8, 9, 10)] == [0, 0, 10]
    check_memory(memory, [table])
