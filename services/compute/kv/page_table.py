"""Page tables of a sequence: one for each kind of cache that its model has."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import TypeAlias

import numpy as np

from services.compute.kv.memory import KVMemory, PageKind
from services.compute.kv.prefix_tree import NO_PAGE, Node

PageKeys: TypeAlias = Callable[[int, int], Iterable[bytes]]
"""The keys of a sequence's pages from one number up to another."""

Paths: TypeAlias = list[list[Node]]
"""Nodes of the prefix trees, a list for each kind."""


class NewEntries:
    """What a plan sends of the page tables of one kind."""

    __slots__ = ("indices", "pages", "slots")

    def __init__(self) -> None:
        self.slots, self.indices, self.pages = array("i"), array("i"), array("i")


class PageTable:
    """Entries of one kind in the order of positions: first those shared through the prefix tree,
    then its own.

    Entries before `first` have left the window for good. `nodes[i].page == pages[i]` for the shared
    ones. Entries before `num_sent` are known to the device; a change below that mark lowers it, so
    that they are sent again. `room` counts the positions that have their pages, and those before.
    """

    __slots__ = (
        *("_kind", "_left", "_namespace", "_tree", "first", "nodes", "num_sent", "page_tokens"),
        *("pages", "room"),
    )

    def __init__(self, kind: PageKind, namespace: Hashable) -> None:
        self._kind = kind
        self._namespace = namespace
        self._tree = kind.tree
        self.page_tokens = kind.page_tokens
        self.first = 0
        self.pages = array("i")
        self.nodes: list[Node] = []
        self._left: list[Node] = []  # the last shared node, if the sequence has none any more
        self.num_sent = 0
        self.room = 0

    @property
    def has_unsent(self) -> bool:
        return self.num_sent * self.page_tokens < self.room

    @property
    def tips(self) -> list[Node]:
        """The last node that was shared: all that the sequence has read is at or above it."""
        return self.nodes[-1:] or self._left

    def find(self, page_keys: PageKeys, max_pages: int, found: Paths | None = None) -> Paths:
        """Look up how much of this sequence the tree knows; nothing is held yet.

        With what the last call returned as `found`, only what has changed since is looked up.
        """
        (path,) = found or ([],)
        while path and path[-1].detached:
            path.pop()
        keys = page_keys(len(path), max_pages)
        path += self._tree.match(self._namespace, keys, path[-1] if path else None)
        return [path]

    def num_hit(self, found: Paths) -> int:
        """How many pages of the prefix need not be computed again."""
        return self.longest_hit(found[0], len(found[0]))

    def longest_hit(self, path: list[Node], num_pages: int) -> int:
        """The longest prefix, of at most so many pages, with all that a query behind it needs."""
        return min(num_pages, len(path))

    def select(self, found: Paths, start: int) -> Paths:
        """Those nodes that a sequence shares which goes on at position `start`.

        Behind a hit they are all that it needs; one that comes back from swap space has the rest.
        """
        path, stop = found[0], start // self.page_tokens
        return found if len(path) <= stop else [path[:stop]]

    def num_missing(self, nodes: Paths, start: int, num_tokens: int, max_chunk: int) -> int:
        """Pages that must be available for a sequence of this length to start with these nodes."""
        kind, held = self._kind, nodes[0]
        num_own = -(-num_tokens // self.page_tokens) - len(held)
        return kind.width * (num_own + self._tree.num_idle(held))

    def adopt(self, nodes: Paths, start: int) -> None:
        """Begin the (empty) table of a sequence that goes on at `start` with what `select` gave."""
        self._tree.hold(nodes[0])
        self.nodes, self._left = nodes[0], []
        self.pages = array("i", [node.page for node in self.nodes])
        self.room = len(self.pages) * self.page_tokens

    def reserve(self, num_tokens: int, num_now: int) -> bool:
        """Make room for a whole prompt, or in a window for the positions computed now."""
        return self.grow(num_tokens, 0)

    def num_lacking(self, num_tokens: int) -> int:
        """Pages that room for this many positions still takes."""
        return self._kind.width * max(-((self.room - num_tokens) // self.page_tokens), 0)

    def grow(self, num_tokens: int, start: int) -> bool:
        """Make room for this many positions, of which queries come from `start` on.

        False, and nothing taken, if pages are short.
        """
        missing = -((self.room - num_tokens) // self.page_tokens)
        if missing <= 0:
            return True
        taken = self._kind.take(missing)
        if taken is None:
            return False
        self.pages += taken
        self.room += missing * self.page_tokens
        return True

    def drop(self, start: int) -> None:
        """Release what no query from position `start` on sees.

        Steps in flight may still read it: a plan made later gives it to another owner, whose
        writes one stream orders behind those reads.
        """

    def publish(self, page_keys: PageKeys, num_tokens: int, launched: bool = True) -> list[Node]:
        """Put the full pages among the first `num_tokens` positions into the tree; return them.

        Where another sequence has published the same tokens before, its page takes the place of
        this one's, which is freed: a step in flight may still read it, but its next owner writes
        to it in a later step, and one stream orders them all. With a step that is not `launched`
        yet that would not hold, so publishing stops there.
        """
        nodes, pages, first, tree = self.nodes, self.pages, self.first, self._tree
        num_nodes = len(nodes)
        num_before, num_full = first + num_nodes, num_tokens // self.page_tokens
        if num_full <= num_before:
            return []
        parent = nodes[-1] if nodes else None
        if parent is None and first:
            # Swapped in without the pages before its window, which a path has to lead to.
            parent = tree.lead(self._namespace, page_keys(0, first))
        for index, key in enumerate(page_keys(num_before, num_full), num_nodes):
            page, is_new = pages[index], False
            if parent is not None:
                if parent.detached:
                    break
                is_new = not parent.children
            if not (launched or is_new) and tree.has_page(self._namespace, parent, key):
                break
            node = tree.insert(self._namespace, parent, key, page)
            if node.page != page:
                pages[index] = node.page
                self._kind.give_back(page)
                self.num_sent = min(self.num_sent, first + index)
            nodes.append(node)
            parent = node
        return nodes[num_nodes:]

    def send(self, slot: int, num_tokens: int, by_kind: list[NewEntries]) -> None:
        """Add the entries of the first `num_tokens` positions that the device does not know."""
        sent, end = self.num_sent, -(-num_tokens // self.page_tokens)
        if end <= sent:
            return
        self.num_sent = end
        new = by_kind[self._kind.number]
        if end - sent == 1:
            new.slots.append(slot)
            new.indices.append(sent)
            new.pages.append(self.pages[sent - self.first])
        else:
            new.slots += array("i", (slot,)) * (end - sent)
            new.indices.frombytes(np.arange(sent, end, dtype=np.int32).tobytes())
            new.pages += self.pages[sent - self.first : end - self.first]

    def resend(self) -> None:
        self.num_sent = self.first

    def swapped_pages(self, num_tokens: int) -> array[int]:
        """The pages that a sequence needs which goes on behind so many positions."""
        first, end = self._kind.first_entry(num_tokens), self._kind.entries_for(num_tokens)
        return self._kind.pages_of(self.pages[first - self.first : end - self.first])

    def restored(self, num_tokens: int, host_pages: array[int]) -> tuple[array[int], array[int]]:
        """Pair what `swapped_pages` became with what takes its place, but for pages found again."""
        pages = self.swapped_pages(num_tokens)
        if len(pages) != len(host_pages):
            raise RuntimeError(f"{len(host_pages)} pages were swapped out, {len(pages)} come back")
        num_found = len(self.nodes) * self._kind.width
        return host_pages[num_found:], pages[num_found:]

    def distrust(self) -> None:
        """Make all shared pages of this sequence unfindable: one of them may be damaged."""
        if self.nodes:
            node, above = self.nodes[0], self.nodes[0].parent
            while above is not None and above.parent is not None:
                node, above = above, above.parent
            self._tree.detach(node)

    def release(self) -> None:
        """Give up every page: shared ones stay in the tree, its own are free at once."""
        for page in self.pages[len(self.nodes) :]:
            self._kind.give_back(page)
        self._tree.release(self.nodes, self._kind.memory.now)
        self._left = self.tips
        self.pages = array("i")
        self.nodes = []
        self.first = self.num_sent = self.room = 0


class WindowTable(PageTable):
    """Of a window or a chunk, only what the next query sees; of a long prompt what is computed now,
    too."""

    __slots__ = ()

    def longest_hit(self, path: list[Node], num_pages: int) -> int:
        end = at = min(num_pages, len(path))
        while at > self._kind.first_entry(end * self.page_tokens):
            at -= 1
            if path[at].page == NO_PAGE:
                end = at
        return end

    def select(self, found: Paths, start: int) -> Paths:
        nodes = found[0][self._kind.first_entry(start) : start // self.page_tokens]
        lost = next((at for at, node in enumerate(nodes) if node.page == NO_PAGE), None)
        return [nodes[:lost]]

    def num_missing(self, nodes: Paths, start: int, num_tokens: int, max_chunk: int) -> int:
        kind, (held,) = self._kind, nodes
        needed = kind.entries_for(num_tokens) - kind.first_entry(start)
        num_own = min(needed, kind.most_entries(num_tokens, max_chunk)) - len(held)
        return kind.width * (max(num_own, 0) + self._tree.num_idle(held))

    def adopt(self, nodes: Paths, start: int) -> None:
        super().adopt(nodes, start)
        self.first = self.num_sent = self._kind.first_entry(start)
        self.room += self.first * self.page_tokens

    def reserve(self, num_tokens: int, num_now: int) -> bool:
        return self.grow(num_now, 0)

    def grow(self, num_tokens: int, start: int) -> bool:
        self.drop(start)
        return super().grow(num_tokens, start)

    def drop(self, start: int) -> None:
        # A structured sample that is on its way may be skipped, and its position computed again.
        first, nodes = self._kind.first_entry(start - 1), self.nodes
        if nodes and not nodes[-1].detached:
            # Below the last shared page the next one is published.
            first = min(first, self.first + len(nodes) - 1)
        count = first - self.first
        if count <= 0:
            return
        if 0 < len(nodes) <= count:
            self._left = nodes[-1:]
        for page in self.pages[len(nodes) : count]:
            self._kind.give_back(page)
        self._tree.release(nodes[:count], self._kind.memory.now)
        del nodes[:count], self.pages[:count]
        self.first = first
        self.num_sent = max(self.num_sent, first)

    def publish(self, page_keys: PageKeys, num_tokens: int, launched: bool = True) -> list[Node]:
        # The last shared page leaves the window only if it is detached, and the path with it.
        return [] if self._left else super().publish(page_keys, num_tokens, launched)


class PageTables:
    """The tables of a model with several kinds of cache, as one.

    A prefix hit is as long as all kinds allow, room is what all of them have.
    """

    __slots__ = ("_memory", "page_tokens", "tables")

    def __init__(self, memory: KVMemory, namespace: Hashable) -> None:
        self._memory = memory
        self.tables = [_table(kind, namespace) for kind in memory.kinds]
        self.page_tokens = memory.page_tokens

    @property
    def room(self) -> int:
        return min(table.room for table in self.tables)

    @property
    def has_unsent(self) -> bool:
        return any(table.has_unsent for table in self.tables)

    @property
    def tips(self) -> list[Node]:
        return [node for table in self.tables for node in table.tips]

    def find(self, page_keys: PageKeys, max_pages: int, found: Paths | None = None) -> Paths:
        paths = found or [[] for _ in self.tables]
        for table, path in zip(self.tables, paths, strict=True):
            table.find(page_keys, max_pages, [path])
            max_pages = min(max_pages, len(path))
        return paths

    def num_hit(self, found: Paths) -> int:
        num_pages, before = min(map(len, found)), -1
        while num_pages != before:
            before = num_pages
            for table, path in zip(self.tables, found, strict=True):
                num_pages = table.longest_hit(path, num_pages)
        return num_pages

    def select(self, found: Paths, start: int) -> Paths:
        pairs = zip(self.tables, found, strict=True)
        return [nodes for table, path in pairs for nodes in table.select([path], start)]

    def num_missing(self, nodes: Paths, start: int, num_tokens: int, max_chunk: int) -> int:
        pairs = zip(self.tables, nodes, strict=True)
        return sum(t.num_missing([held], start, num_tokens, max_chunk) for t, held in pairs)

    def adopt(self, nodes: Paths, start: int) -> None:
        for table, held in zip(self.tables, nodes, strict=True):
            table.adopt([held], start)

    def reserve(self, num_tokens: int, num_now: int) -> bool:
        return all(table.reserve(num_tokens, num_now) for table in self.tables)

    def num_lacking(self, num_tokens: int) -> int:
        return sum(table.num_lacking(num_tokens) for table in self.tables)

    def grow(self, num_tokens: int, start: int) -> bool:
        self.drop(start)  # of all kinds, before one of them takes
        return all(table.grow(num_tokens, start) for table in self.tables)

    def drop(self, start: int) -> None:
        self._memory.now += 1
        for table in self.tables:
            table.drop(start)

    def publish(self, page_keys: PageKeys, num_tokens: int, launched: bool = True) -> list[Node]:
        published = (table.publish(page_keys, num_tokens, launched) for table in self.tables)
        return list(chain.from_iterable(published))

    def send(self, slot: int, num_tokens: int, by_kind: list[NewEntries]) -> None:
        for table in self.tables:
            table.send(slot, num_tokens, by_kind)

    def resend(self) -> None:
        for table in self.tables:
            table.resend()

    def swapped_pages(self, num_tokens: int) -> array[int]:
        return array("i", chain.from_iterable(t.swapped_pages(num_tokens) for t in self.tables))

    def restored(self, num_tokens: int, host_pages: array[int]) -> tuple[array[int], array[int]]:
        sources, targets, stop = array("i"), array("i"), 0
        for table in self.tables:
            start, stop = stop, stop + len(table.swapped_pages(num_tokens))
            froms, tos = table.restored(num_tokens, host_pages[start:stop])
            sources += froms
            targets += tos
        return sources, targets

    def distrust(self) -> None:
        for table in self.tables:
            table.distrust()

    def release(self) -> None:
        self._memory.now += 1
        for table in self.tables:
            table.release()


def make_table(memory: KVMemory, namespace: Hashable) -> PageTable | PageTables:
    """The page table of a new sequence, whose pages those of one namespace may find."""
    if len(memory.kinds) == 1:
        return _table(memory.kinds[0], namespace)
    return PageTables(memory, namespace)


def _table(kind: PageKind, namespace: Hashable) -> PageTable:
    return PageTable(kind, namespace) if kind.span.is_full else WindowTable(kind, namespace)
