"""Checks that hold for KV memory at every moment: no page is lost, none has two owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from services.compute.kv import KVMemory, Node, PageTable, PrefixTree
from services.compute.scheduler.scheduler import Scheduler


def findable_nodes(tree: PrefixTree) -> Iterator[Node]:
    """Walk over all findable nodes, parents first."""
    below = [node for root in tree._roots.values() for node in root.children.values()]
    while below:
        node = below.pop()
        yield node
        below.extend(node.children.values())


def check_memory(memory: KVMemory, tables: Iterable[PageTable]) -> None:
    """Every page is free, or one table's own, or one node's of the tree."""
    tables = list(tables)
    holders: Counter[int] = Counter()
    held: dict[int, Node] = {}
    owners: Counter[int] = Counter()
    for table in tables:
        assert [node.page for node in table.nodes] == list(table.pages[: len(table.nodes)])
        for node in table.nodes:
            holders[id(node)] += 1
            held[id(node)] = node
        owners.update(table.pages[len(table.nodes) :])
    findable = {id(node): node for node in findable_nodes(memory.tree)}
    nodes = {**findable, **held}
    owners.update(node.page for node in nodes.values())
    assert all(count == 1 for count in owners.values()), "a page has two owners"
    assert all(memory.device.is_used(page) for page in owners)
    assert len(owners) + memory.device.num_free == memory.device.num_pages, "a page is lost"
    for key, node in nodes.items():
        assert node.refs == holders[key]
        assert node.detached is (key not in findable)
    idle = [node for node in findable.values() if not node.refs]
    assert memory.tree.num_evictable == len(idle)


def check_scheduler(scheduler: Scheduler) -> None:
    """The same for all sequences of a scheduler, with its slots and its swap space."""
    sequences = list(scheduler._state.attempts)
    memory = scheduler._state.memory
    check_memory(memory, [sequence.table for sequence in sequences])
    host = [page for sequence in sequences for page in sequence.host_pages]
    assert len(set(host)) == len(host)
    assert len(host) + memory.host.num_free == memory.host.num_pages
    running = scheduler._state.running
    slots = [sequence.slot for sequence in sequences if sequence.slot >= 0]
    assert len(set(slots)) == len(slots) == len(running)
    assert sorted(slots + running._free_slots) == list(range(len(running._epochs)))
    for sequence in sequences:
        if sequence.slot < 0:
            assert not sequence.table.pages
            assert not sequence.in_flight
