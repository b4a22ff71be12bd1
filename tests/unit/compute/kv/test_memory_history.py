"""Random histories of page tables over one memory, against a model of what each page holds.

The memory has cache groups of one kind or of several; a page that belongs to a group holds that
group's part of a text's tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from services.compute.kernels.step.span import AttentionSpan
from services.compute.kv.memory import KVMemory, PageKind
from services.compute.kv.page_table import PageTable, PageTables, Paths, WindowTable, make_table
from tests.cases import num_cases
from tests.spans import Sizes
from tests.unit.compute.fake_device import make_groups
from tests.unit.compute.memory_check import check_memory, pages_of, tables_of

PAGE_TOKENS = 2
MAX_CHUNK = 8
# Windows of the groups, or chunks; 0 sees everything.
MODELS = [
    *((0,), (4,), (3, 3), (0, 5), (0, 3, 3, 3, 3, 3), (7, 0, 2)),
    *((AttentionSpan.chunk(6),), (0, AttentionSpan.chunk(5)), (AttentionSpan.chunk(3), 0, 2)),
]

Content = tuple[int, str, bytes]  # of a full page: its group, and all tokens up to its end


@dataclass(eq=False)
class Text:
    """A table and the tokens it stands for."""

    salt: str
    tokens: list[int]
    table: PageTable | PageTables
    num_written: int = 0
    swapped: list[Content | None] = field(default_factory=list)

    def key(self, index: int) -> bytes:
        """The tokens of one page."""
        return bytes(self.tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])

    def keys(self, first: int, last: int) -> Iterator[bytes]:
        """The tokens of a range of pages."""
        return map(self.key, range(first, last))

    def content(self, group: int, index: int) -> Content:
        """What page `index` must hold: everything up to its end."""
        return group, self.salt, bytes(self.tokens[: (index + 1) * PAGE_TOKENS])


def needed(kind: PageKind, position: int) -> range:
    """The pages, all of them full, that a query at this position reads, but for its own."""
    return range(kind.span.first_position(position) // PAGE_TOKENS, position // PAGE_TOKENS)


class MemoryHistory(RuleBasedStateMachine):
    """Tables begin, grow, publish, swap and end; pages are evicted and distrusted in between.

    Pages that are swapped out are leased for a while.
    """

    texts = Bundle("texts")

    @initialize(windows=st.sampled_from(MODELS))
    def start(self, windows: Sizes) -> None:
        groups = make_groups(windows, PAGE_TOKENS)
        self.memory = KVMemory(12 * len(windows), 0, groups)
        self.live: list[Text] = []
        self.contents: dict[int, Content | None] = {}
        self.has_distrusted = False
        self.leases: list[array[int]] = []

    def tables(self, text: Text) -> Iterator[tuple[PageKind, PageTable]]:
        """One for each kind."""
        return zip(self.memory.kinds, tables_of(text.table), strict=True)

    def pages(self, text: Text, index: int) -> Iterator[tuple[int, int]]:
        """The groups and their pages at one place of a table."""
        for kind, table in self.tables(text):
            if index >= table.first:
                entry = table.pages[index - table.first : index - table.first + 1]
                yield from zip(kind.groups.tolist(), kind.pages_of(entry), strict=True)

    def find(self, text: Text, max_pages: int) -> tuple[Paths, int]:
        """What a text finds, and the position behind its hit."""
        found = text.table.find(text.keys, max_pages)
        start = text.table.num_hit(found) * PAGE_TOKENS
        nodes = text.table.select(found, start)
        for kind, held in zip(self.memory.kinds, nodes, strict=True):
            first = start // PAGE_TOKENS - len(held)
            assert first <= min(needed(kind, start), default=first), "a page is missing"
            for index, node in enumerate(held, first):
                for group, page in zip(kind.groups, pages_of(kind, [node.page]), strict=True):
                    content = text.content(int(group), index)
                    assert self.contents[page] == content, "found somebody else's page"
        return found, start

    def adopt(self, text: Text, nodes: Paths, start: int) -> bool:
        """Begin a table; False, and it is empty, if pages are short."""
        table, available = text.table, self.memory.num_available
        before = self.memory.num_expected
        num_tokens = len(text.tokens)
        num_missing = table.num_missing(nodes, start, num_tokens, MAX_CHUNK)
        trees = [
            kind.width * kind.tree.num_idle(held)
            for kind, held in zip(self.memory.kinds, nodes, strict=True)
        ]
        table.adopt(nodes, start)
        assert self.memory.num_expected == before - sum(trees)
        assert self.leases or self.memory.num_available == available - sum(trees)
        reserved = table.reserve(num_tokens, min(num_tokens, start + MAX_CHUNK))
        assert reserved or num_missing > available
        if not reserved:
            table.release()
        return reserved

    @rule(
        target=texts,
        salt=st.sampled_from(["", "tenant"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
    )
    def begin(self, salt: str, tokens: list[int]) -> object:
        text = Text(salt, tokens, make_table(self.memory, salt))
        found, start = self.find(text, (len(tokens) - 1) // PAGE_TOKENS)
        if not self.adopt(text, text.table.select(found, start), start):
            return multiple()
        text.num_written = start
        self.live.append(text)
        return text

    @rule(text=texts, count=st.integers(1, MAX_CHUNK))
    def write(self, text: Text, count: int) -> None:
        start = text.num_written
        stop = min(len(text.tokens), start + count)
        if text.swapped or not text.table.grow(stop, start):
            return
        for kind, table in self.tables(text):
            assert start // PAGE_TOKENS >= table.first + len(table.nodes), "a shared page"
            assert len(table.pages) <= kind.most_entries(len(text.tokens), MAX_CHUNK) + 1
        for index in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            is_full = (index + 1) * PAGE_TOKENS <= stop
            for group, page in self.pages(text, index):
                assert not any(page in leased for leased in self.leases)
                self.contents[page] = text.content(group, index) if is_full else None
        text.num_written = stop

    @rule(text=texts)
    def publish(self, text: Text) -> None:
        if text.swapped:
            return
        before = [len(table.nodes) for _, table in self.tables(text)]
        gained = text.table.publish(text.keys, text.num_written)
        pairs = zip(self.tables(text), before, strict=True)
        assert gained == [node for (_, table), n in pairs for node in table.nodes[n:]]
        for _, table in self.tables(text):
            is_distrusted = isinstance(table, WindowTable) and bool(table._left)
            assert self.has_distrusted or not is_distrusted
            if not is_distrusted and not any(node.detached for node in table.nodes):
                assert table.first + len(table.nodes) == text.num_written // PAGE_TOKENS

    @rule(text=texts)
    def leave_behind(self, text: Text) -> None:
        if not text.swapped:
            text.table.drop(text.num_written)

    @rule(text=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def go_on(self, text: Text, tokens: list[int]) -> None:
        text.tokens = text.tokens + tokens

    @rule(text=consumes(texts))
    def end(self, text: Text) -> None:
        text.table.release()
        self.live.remove(text)

    @rule(text=texts)
    def swap_out(self, text: Text) -> None:
        if not text.swapped:
            pages = text.table.swapped_pages(text.num_written)
            text.swapped = [self.contents.get(page) for page in pages]
            self.memory.device.lease(pages, arriving=False)
            self.leases.append(pages)
            text.table.release()

    @rule(which=st.integers(0, 5))
    def end_lease(self, which: int) -> None:
        if which < len(self.leases):
            self.memory.device.end_lease(self.leases.pop(which))

    @rule(text=texts)
    def swap_in(self, text: Text) -> None:
        if not text.swapped:
            return
        found, start = self.find(text, (len(text.tokens) - 1) // PAGE_TOKENS)
        start = max(start, text.num_written)
        if not self.adopt(text, text.table.select(found, start), start):
            return
        if start == text.num_written:
            numbers = array("i", range(len(text.swapped)))
            for number, page in zip(*text.table.restored(start, numbers), strict=True):
                self.contents[page] = text.swapped[number]
        text.num_written, text.swapped = start, []

    @rule(text=texts)
    def distrust(self, text: Text) -> None:
        text.table.distrust()
        self.has_distrusted = True
        # Another sequence may have published the same tokens since, on a page of its own.
        distrusted = [node for _, table in self.tables(text) for node in table.nodes]
        assert all(node.detached for node in distrusted)
        assert not any(
            node in distrusted for path in text.table.find(text.keys, 9) for node in path
        )

    @rule(count=st.integers(0, 9))
    def evict(self, count: int) -> None:
        available = self.memory.num_available
        pages = self.memory.take(count)
        assert (pages is not None) is (count <= available)
        leased = set().union(*self.leases)
        for page in pages or ():
            assert page not in leased
            self.contents[page] = None
            self.memory.device.give_back(page)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if hasattr(self, "memory"):
            self.memory.now += 1
            check_memory(self.memory, [text.table for text in self.live])

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for text in getattr(self, "live", ()):
            for kind, table in () if text.swapped else self.tables(text):
                for index in needed(kind, text.num_written):
                    assert index >= table.first
                    pages = pages_of(kind, [table.pages[index - table.first]])
                    for group, page in zip(kind.groups.tolist(), pages, strict=True):
                        assert self.contents[page] == text.content(group, index)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for text in self.live:
            text.table.release()
        for pages in self.leases:
            self.memory.device.end_lease(pages)
        self.memory.flush()
        assert self.memory.device.num_free == self.memory.device.num_pages


TestMemoryHistory = MemoryHistory.TestCase
TestMemoryHistory.settings = settings(
    max_examples=num_cases(100, exploring=400), stateful_step_count=40
)


def test_what_another_wrote_again_is_found_though_a_damaged_page_of_it_was_twice_distrusted() -> (
    None
):
    state = MemoryHistory()
    state.start(windows=(0,))
    damaged = state.begin(salt="", tokens=[0, 1])
    state.write(text=damaged, count=2)
    state.publish(text=damaged)
    state.distrust(text=damaged)
    sound = state.begin(salt="", tokens=[0, 1])
    state.write(text=sound, count=2)
    state.publish(text=sound)
    state.distrust(text=damaged)
    assert isinstance(damaged, Text) and isinstance(sound, Text)
    assert sound.table.find(sound.keys, 1) == [sound.table.nodes]
    state.teardown()
