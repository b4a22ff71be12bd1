"""Checks that hold for KV memory at every moment: no page is lost, none has two owners."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from services.compute.kv.memory import KVMemory, PageKind, PagePool
from services.compute.kv.page_table import PageTable, PageTables
from services.compute.kv.prefix_tree import NO_PAGE, Node, PrefixTree
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.sequence import Status
from services.compute.step import StepPlan


def tables_of(table: PageTable | PageTables) -> list[PageTable]:
    """One for each kind."""
    return table.tables if isinstance(table, PageTables) else [table]


def findable_nodes(tree: PrefixTree) -> Iterator[Node]:
    """Walk over all findable nodes, parents first."""
    below = [node for root in tree._roots.values() for node in root.children.values()]
    while below:
        node = below.pop()
        yield node
        below.extend(node.children.values())


def pages_of(kind: PageKind, entries: Iterable[int]) -> array[int]:
    """The pages of all groups behind these entries."""
    return kind.pages_of(array("i", entries))


def check_memory(memory: KVMemory, tables: Iterable[PageTable | PageTables]) -> None:
    """Every page is free, or one table's own, or one node's of a tree, over all kinds."""
    all_tables = [part for table in tables for part in tables_of(table)]
    owners: Counter[int] = Counter()
    for kind in memory.kinds:
        owners.update(check_kind(kind, [t for t in all_tables if t._kind is kind]))
    assert all(count == 1 for count in owners.values()), "a page has two owners"
    assert all(memory.device.is_used(page) for page in owners)
    check_pool(memory.device, len(owners))
    device = memory.device
    evictable = sum(kind.width * kind.tree.num_evictable for kind in memory.kinds)
    assert memory.num_available == max(device.num_free + evictable - device.num_read, 0)
    assert memory.num_expected == device.num_free + evictable + device.num_returned
    is_read = {page for page in owners if page in device._leases and page not in device._arriving}
    assert len(is_read) == device.num_read


def check_pool(pool: PagePool, num_owned: int) -> None:
    """Every page that nobody owns is free, or will be when its leases have ended."""
    assert num_owned + pool.num_free + pool.num_returned == pool.num_pages, "a page is lost"
    assert pool._returned <= pool._leases.keys()
    assert pool._arriving <= pool._leases.keys() - pool._returned
    assert not any(pool.is_used(page) for page in pool._returned)
    assert pool._returned.isdisjoint(pool._free[: pool.num_free])


def check_kind(kind: PageKind, tables: list[PageTable]) -> list[int]:
    """Check the tables and the tree of one kind; return the pages they own."""
    owned: list[int] = []
    holders: Counter[int] = Counter()
    held: dict[int, Node] = {}
    for table in tables:
        assert [node.page for node in table.nodes] == list(table.pages[: len(table.nodes)])
        assert table.num_sent >= table.first
        assert table.room == (table.first + len(table.pages)) * table.page_tokens
        for node in table.nodes:
            holders[id(node)] += 1
            held[id(node)] = node
        owned += pages_of(kind, table.pages[len(table.nodes) :])
    findable = {id(node): node for node in findable_nodes(kind.tree)}
    nodes = {**findable, **held}
    owned += pages_of(kind, (node.page for node in nodes.values() if node.page != NO_PAGE))
    for key, node in nodes.items():
        assert node.refs == holders[key]
        assert node.detached is (key not in findable)
        if node.page == NO_PAGE:
            assert not kind.span.is_full and node.children and not node.refs, (
                "a node that leads nowhere"
            )
    idle = [node for node in findable.values() if not node.refs and node.page != NO_PAGE]
    assert set(kind.tree._idle) == set(idle)
    return owned


def check_scheduler(scheduler: Scheduler) -> None:
    """The same for all sequences of a scheduler, with its slots and its swap space."""
    sequences = list(scheduler._state.attempts)
    memory = scheduler._state.memory
    check_memory(memory, [sequence.table for sequence in sequences])
    host = [page for sequence in sequences for page in sequence.host_pages]
    assert len(set(host)) == len(host)
    check_pool(memory.host, len(host))
    check_leases(scheduler)
    running = scheduler._state.running
    for share in scheduler._state.shares._shares.values():
        own = [sequence for sequence in sequences if sequence.share is share]
        assert share.num_open == len(own)
        assert share.num_running == sum(sequence.slot >= 0 for sequence in own)
    slots = [sequence.slot for sequence in sequences if sequence.slot >= 0]
    assert len(set(slots)) == len(slots) == len(running)
    assert sorted(slots + running._free_slots) == list(range(len(running._epochs)))
    for sequence in sequences:
        tables = tables_of(sequence.table)
        has_host_pages = sequence.status in (Status.SWAPPED, Status.LOADING)
        assert has_host_pages is (len(sequence.host_pages) > 0)
        if sequence.slot < 0:
            assert not any(table.pages or table.first for table in tables)
            assert not sequence.in_flight
        for table in tables:
            most = table._kind.most_entries(sequence.token_limit, scheduler._planner._most_at_once)
            assert len(table.pages) <= most, "more than a window and a chunk"


def check_leases(scheduler: Scheduler) -> None:
    """Leased are the pages of the transfers under way, and loading sequences wait for one."""
    memory, transfers = scheduler._state.memory, scheduler._state.transfers
    leases: dict[PagePool, Counter[int]] = {memory.device: Counter(), memory.host: Counter()}
    for transfer, _ in transfers._under_way.values():
        pools = transfers._pools(transfer.direction)
        for pool, pages in zip(pools, transfer.pages, strict=True):
            leases[pool].update(pages.tolist())
    for pool, expected in leases.items():
        assert pool._leases == expected
    for sequence in scheduler._state.running:
        if sequence.status is Status.LOADING:
            assert transfers._under_way[sequence.transfer][1] is sequence


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Every row's sequence holds, in every kind, all pages that the row reads or writes."""
    running = scheduler._state.running
    by_slot = {s.slot: s for s in running if s.status is Status.RUNNING}
    num_drafts = [*plan.num_drafts.tolist(), *[0] * (plan.num_rows - len(plan.num_drafts))]
    rows = zip(plan.row_slot, plan.q_start, plan.pos_upper + num_drafts, strict=True)
    for slot, start, stop in rows:
        for table in tables_of(by_slot[int(slot)].table):
            seen = table._kind.span.first_position(int(start))
            assert table.first * table.page_tokens <= seen, "a page was released too early"
            assert stop <= table.room, "a position without a page"


def unowned_pages(scheduler: Scheduler) -> list[int]:
    """Device pages that are free: no plan made by now may read them."""
    device = scheduler._state.memory.device
    pages = set(range(device.num_pages)) - returned_pages(scheduler)
    return [page for page in pages if not device.is_used(page)]


def returned_pages(scheduler: Scheduler) -> frozenset[int]:
    """Device pages without an owner that transfers still read or write."""
    return frozenset(scheduler._state.memory.device._returned)
