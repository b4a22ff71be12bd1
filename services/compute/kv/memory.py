"""KV memory: free pages of the device and of swap space, and the page tables of sequences."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

from services.compute.kv.prefix import Node, PrefixTree

PageKeys: TypeAlias = Callable[[int, int], Iterable[bytes]]
"""The keys of a sequence's pages from one number up to another."""


class PagePool:
    """The free pages of one memory: the device's, or the host's swap space.

    Every page is either free or owned by exactly one holder: a sequence's table or the prefix
    tree. Sharing is counted in the tree, where it happens. The page given back last is handed out
    first, so that the pages in use stay few and warm.

    `_place` says where in `_free` each page was put last: it is free if it is still there. So
    taking pages marks nothing. With arrays, the 8,192 pages of a prompt of 128k tokens are one
    copy of 32 KB; in a list they are as many objects, each of which has to be touched.
    """

    __slots__ = ("_free", "_place", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}; it must not be negative")
        self.num_pages = num_pages
        self._free = array("i", range(num_pages))
        self._place = self._free[:]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> array[int] | None:
        """Take `count` pages, all or none."""
        first = len(self._free) - count
        if first < 0:
            return None
        pages = self._free[first:]
        del self._free[first:]
        return pages

    def give_back(self, page: int) -> None:
        """Free one page; RuntimeError if it is free already."""
        if not self.is_used(page):
            raise RuntimeError(f"page {page} is freed twice")
        self._place[page] = len(self._free)
        self._free.append(page)

    def is_used(self, page: int) -> bool:
        place = self._place[page]
        return place >= len(self._free) or self._free[place] != page


class KVMemory:
    """All pages of one runner. An evictable page of the tree counts as available."""

    def __init__(self, num_pages: int, num_host_pages: int, page_tokens: int) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens is {page_tokens}; it must be positive")
        self.page_tokens = page_tokens
        self.device = PagePool(num_pages)
        self.host = PagePool(num_host_pages)
        self.tree = PrefixTree(self.device.give_back)

    @property
    def num_available(self) -> int:
        """Device pages that `take` could hand out."""
        return self.device.num_free + self.tree.num_evictable

    def take(self, count: int) -> array[int] | None:
        """Take device pages, all or none, evicting from the tree where none are free."""
        missing = count - self.device.num_free
        if missing > 0:
            if missing > self.tree.num_evictable:
                return None
            self.tree.evict(missing)
        return self.device.take(count)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


class PageTable:
    """Pages in the order of positions: first those shared through the tree, then its own.

    `nodes[i].page == pages[i]` for the shared ones. `num_sent` entries from the front are known
    to the device; a change below that mark lowers it, so that the entries are sent again.
    """

    __slots__ = ("_memory", "_namespace", "nodes", "num_sent", "pages")

    def __init__(self, memory: KVMemory, namespace: Hashable) -> None:
        self._memory = memory
        self._namespace = namespace
        self.pages = array("i")
        self.nodes: list[Node] = []
        self.num_sent = 0

    @property
    def page_tokens(self) -> int:
        return self._memory.page_tokens

    def find(
        self,
        page_keys: PageKeys,
        max_pages: int,
        found: list[Node] | None = None,
    ) -> list[Node]:
        """Look up how much of this sequence the tree knows; nothing is held yet.

        `found` is what the last call returned: only what has changed since is looked up.
        """
        nodes = found or []
        while nodes and nodes[-1].detached:
            nodes.pop()
        keys = page_keys(len(nodes), max_pages)
        nodes += self._memory.tree.match(self._namespace, keys, nodes[-1] if nodes else None)
        return nodes

    def adopt(self, nodes: list[Node]) -> None:
        """Start the (empty) table with a path that `find` returned."""
        self._memory.tree.hold(nodes)
        self.nodes = nodes
        self.pages = array("i", [node.page for node in nodes])
        self.num_sent = 0

    def grow(self, num_tokens: int) -> bool:
        """Make room for this many positions; False, and nothing changed, if pages are short."""
        missing = self._memory.pages_for(num_tokens) - len(self.pages)
        if missing <= 0:
            return True
        taken = self._memory.take(missing)
        if taken is None:
            return False
        self.pages += taken
        return True

    def publish(self, page_keys: PageKeys, num_tokens: int, launched: bool = True) -> list[Node]:
        """Put the full pages among the first `num_tokens` positions into the tree.

        Returns the nodes that the path of this sequence has grown by.

        Where another sequence has published the same tokens before, its page takes the place of
        this one's, which is freed: a step in flight may still read it, but its next owner writes
        to it in a later step, and one stream orders them all. With a step that is not `launched`
        yet that would not hold, so publishing stops there.
        """
        memory, nodes, pages = self._memory, self.nodes, self.pages
        num_before, num_full = len(nodes), num_tokens // memory.page_tokens
        if num_full <= num_before:
            return []
        parent = nodes[-1] if nodes else None
        for index, key in enumerate(page_keys(num_before, num_full), num_before):
            page, is_new = pages[index], False
            if parent is not None:
                if parent.detached:
                    break
                is_new = not parent.children
            if not (launched or is_new) and memory.tree.match(self._namespace, (key,), parent):
                break
            node = memory.tree.insert(self._namespace, parent, key, page)
            if node.page != page:
                pages[index] = node.page
                memory.device.give_back(page)
                self.num_sent = min(self.num_sent, index)
            nodes.append(node)
            parent = node
        return nodes[num_before:]

    def distrust(self) -> None:
        """Make all shared pages of this sequence unfindable: one of them may be damaged."""
        if self.nodes:
            self._memory.tree.detach(self.nodes[0])

    def release(self) -> None:
        """Let go of every page: shared ones stay in the tree, its own are free at once."""
        give_back = self._memory.device.give_back
        for page in self.pages[len(self.nodes) :]:
            give_back(page)
        self._memory.tree.release(self.nodes)
        self.pages = array("i")
        self.nodes = []
        self.num_sent = 0
