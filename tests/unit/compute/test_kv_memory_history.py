"""Random histories of page tables over one memory, against a model of what each page holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from services.compute.kv import KVMemory, PageTable
from tests.cases import num_cases
from tests.unit.compute.memory_check import check_memory

PAGE_TOKENS = 2


@dataclass(eq=False)
class Text:
    """A table and the tokens it stands for."""

    salt: str
    tokens: list[int]
    table: PageTable
    num_written: int = field(default=0)

    def key(self, index: int) -> bytes:
        """The tokens of one page."""
        return bytes(self.tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])

    def keys(self, first: int, last: int) -> Iterator[bytes]:
        """The tokens of a range of pages."""
        return map(self.key, range(first, last))

    def prefix(self, index: int) -> tuple[str, bytes]:
        """What page `index` must hold: everything up to its end."""
        return self.salt, bytes(self.tokens[: (index + 1) * PAGE_TOKENS])


class MemoryHistory(RuleBasedStateMachine):
    """Tables begin, grow, publish and end; pages are evicted and distrusted in between."""

    texts = Bundle("texts")

    def __init__(self) -> None:
        super().__init__()
        self.memory = KVMemory(num_pages=12, num_host_pages=0, page_tokens=PAGE_TOKENS)
        self.live: list[Text] = []
        self.content: dict[int, tuple[str, bytes]] = {}

    @rule(
        target=texts,
        salt=st.sampled_from(["", "tenant"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    )
    def begin(self, salt: str, tokens: list[int]) -> object:
        text = Text(salt, tokens, PageTable(self.memory, salt))
        nodes = text.table.find(text.keys, (len(tokens) - 1) // PAGE_TOKENS)
        for index, node in enumerate(nodes):
            assert self.content[node.page] == text.prefix(index), "found somebody else's page"
        available = self.memory.num_available
        num_idle = self.memory.tree.num_idle(nodes)
        text.table.adopt(nodes)
        assert self.memory.num_available == available - num_idle
        if not text.table.grow(len(tokens)):
            text.table.release()
            return multiple()
        text.num_written = len(nodes) * PAGE_TOKENS
        self.live.append(text)
        return text

    @rule(text=texts, count=st.integers(1, 8))
    def write(self, text: Text, count: int) -> None:
        stop = min(len(text.tokens), text.num_written + count)
        for index in range(text.num_written // PAGE_TOKENS, stop // PAGE_TOKENS):
            page = text.table.pages[index]
            assert index >= len(text.table.nodes), "a shared page is never written to"
            self.content[page] = text.prefix(index)
        text.num_written = stop

    @rule(text=texts)
    def publish(self, text: Text) -> None:
        before = len(text.table.nodes)
        gained = text.table.publish(text.keys, text.num_written)
        assert gained == text.table.nodes[before:]
        if not any(node.detached for node in text.table.nodes):
            assert len(text.table.nodes) == text.num_written // PAGE_TOKENS

    @rule(text=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def go_on(self, text: Text, tokens: list[int]) -> None:
        available = self.memory.num_available
        missing = self.memory.pages_for(len(text.tokens) + len(tokens)) - len(text.table.pages)
        grown = text.table.grow(len(text.tokens) + len(tokens))
        assert grown is (missing <= available)
        if grown:
            text.tokens = text.tokens + tokens

    @rule(text=consumes(texts))
    def end(self, text: Text) -> None:
        text.table.release()
        self.live.remove(text)

    @rule(text=texts)
    def distrust(self, text: Text) -> None:
        text.table.distrust()
        # Another sequence may have published the same tokens since, on a page of its own.
        assert not any(node in text.table.nodes for node in text.table.find(text.keys, 1))

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        evictable = self.memory.tree.num_evictable
        assert self.memory.tree.evict(count) == min(count, evictable)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        check_memory(self.memory, [text.table for text in self.live])

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for text in self.live:
            for index in range(text.num_written // PAGE_TOKENS):
                assert self.content[text.table.pages[index]] == text.prefix(index)

    def teardown(self) -> None:
        for text in self.live:
            text.table.release()
        self.memory.tree.flush()
        assert self.memory.device.num_free == self.memory.device.num_pages


TestMemoryHistory = MemoryHistory.TestCase
TestMemoryHistory.settings = settings(
    max_examples=num_cases(150, exploring=400), stateful_step_count=40
)


def test_what_another_wrote_again_is_found_though_a_damaged_page_of_it_was_twice_distrusted() -> (
    None
):
    state = MemoryHistory()
    damaged = state.begin(salt="", tokens=[0, 1])
    state.write(text=damaged, count=2)
    state.publish(text=damaged)
    state.distrust(text=damaged)
    sound = state.begin(salt="", tokens=[0, 1])
    state.write(text=sound, count=2)
    state.publish(text=sound)
    state.distrust(text=damaged)
    assert sound.table.find(sound.keys, 1) == sound.table.nodes
    state.teardown()
