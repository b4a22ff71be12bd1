"""KV memory: free pages, the prefix tree of shared ones, and the page tables of sequences."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

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

    __slots__ = ("_free", "_place", "num_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}; it must not be negative")
        self.num_pages = self.num_free = num_pages
        self._free = array("i", range(num_pages))  # the first `num_free` of them
        self._place = self._free[:]

    def take(self, count: int) -> array[int] | None:
        num_left = self.num_free - count
        if num_left < 0:
            return None
        pages = self._free[num_left : self.num_free]
        self.num_free = num_left
        return pages

    def give_back(self, page: int) -> None:
        """Free one page; RuntimeError if it is free already."""
        if not self.is_used(page):
            raise RuntimeError(f"page {page} is freed twice")
        self._place[page] = self.num_free
        self._free[self.num_free] = page
        self.num_free += 1

    def is_used(self, page: int) -> bool:
        place = self._place[page]
        return place >= self.num_free or self._free[place] != page


class Node:
    """One full page: `key` holds its tokens, the path from the root all tokens before them.

    A root is the empty prefix of a namespace, which is its key.
    """

    __slots__ = ("children", "detached", "key", "page", "parent", "refs")

    def __init__(self, key: Hashable, page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[Hashable, Node] = {}
        self.refs = 0
        self.detached = False


class PrefixTree:
    """A radix tree over pages, after SGLang's RadixAttention: one node a page, no compressed edges.

    So a lookup is one hash of 64 bytes a page, and a node can be held, shared, evicted and detached
    by itself. Keys are compared, not only hashed. Namespaces (one per cache salt) never meet.

    `refs` counts the sequences that hold a node; each of them holds every node above it, too.
    Pages without a holder stay for later requests and are evicted, least recently used first.
    """

    __slots__ = ("_idle", "_pool", "_roots")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._roots: dict[Hashable, Node] = {}
        # Nodes with no holder, in the order of eviction. `release` appends the deepest node
        # first and a held node's ancestors are all held, so a child always stands before its
        # parent here: the first entry is always a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        return len(self._idle)

    def match(
        self, namespace: Hashable, keys: Iterable[bytes], above: Node | None = None
    ) -> list[Node]:
        """Find the longest known prefix of these pages (below `above`); nothing is held yet."""
        found: list[Node] = []
        at: Node | None = self._roots.get(namespace) if above is None else above
        if at is None:
            return found
        for key in keys:
            child = at.children.get(key)
            if child is None:
                break
            found.append(child)
            at = child
        return found

    def num_idle(self, nodes: Sequence[Node]) -> int:
        """Count those of a matched path that would stop being evictable if it were held."""
        # Held nodes come first on any path.
        return len(nodes) - bisect_left(nodes, True, key=lambda node: not node.refs)

    def hold(self, nodes: Sequence[Node]) -> None:
        idle = self._idle
        for node in nodes:
            if not node.refs:
                del idle[node]
            node.refs += 1

    def insert(self, namespace: Hashable, parent: Node | None, key: bytes, page: int) -> Node:
        """Publish a page below `parent`, held once by the caller.

        If these tokens are known already, their node is held instead, and `page` stays the
        caller's.
        """
        above = parent or self._roots.get(namespace)
        if above is None:
            above = self._roots[namespace] = Node(namespace, -1, None)
        node = above.children.get(key)
        if node is None:
            node = above.children[key] = Node(key, page, above)
        elif not node.refs:
            del self._idle[node]
        node.refs += 1
        return node

    def release(self, nodes: Sequence[Node]) -> None:
        """Undo one `hold` (or `insert`) of each node of a path, given from the root down."""
        idle = self._idle
        for node in reversed(nodes):
            node.refs -= 1
            if not node.refs:
                if node.detached:
                    self._pool.give_back(node.page)
                else:
                    idle[node] = None

    def evict(self, count: int) -> int:
        """Free up to `count` pages without a holder; return how many there were."""
        idle = self._idle
        evicted = 0
        while evicted < count and idle:
            node, _ = idle.popitem(last=False)
            self._unlink(node)
            node.detached = True
            self._pool.give_back(node.page)
            evicted += 1
        return evicted

    def flush(self) -> int:
        return self.evict(len(self._idle))

    def detach(self, node: Node) -> list[Node]:
        """Make a node and all below it unfindable; return those that are still held.

        Their pages are freed when the last holder releases them.
        """
        if node.detached:
            return []
        self._unlink(node)
        still_held: list[Node] = []
        doubtful = [node]
        while doubtful:
            at = doubtful.pop()
            at.detached = True
            doubtful.extend(at.children.values())
            at.children = {}
            if at.refs:
                still_held.append(at)
            else:
                del self._idle[at]
                self._pool.give_back(at.page)
        return still_held

    def _unlink(self, node: Node) -> None:
        """Take a node out of its parent; a namespace without pages is forgotten."""
        above = node.parent
        if above is None:
            raise RuntimeError("a root is no page")
        del above.children[node.key]
        if above.parent is None and not above.children:
            del self._roots[above.key]


class KVMemory:
    """All pages of one runner. An evictable page of the tree counts as available."""

    def __init__(self, num_pages: int, num_host_pages: int, page_tokens: int) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens is {page_tokens}; it must be positive")
        self.page_tokens = page_tokens
        self.device = PagePool(num_pages)
        self.host = PagePool(num_host_pages)
        self.tree = PrefixTree(self.device)

    @property
    def num_available(self) -> int:
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
        self, page_keys: PageKeys, max_pages: int, found: list[Node] | None = None
    ) -> list[Node]:
        """Look up how much of this sequence the tree knows; nothing is held yet.

        With what the last call returned as `found`, only what has changed since is looked up.
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
        """Put the full pages among the first `num_tokens` positions into the tree; return them.

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
        """Give up every page: shared ones stay in the tree, its own are free at once."""
        give_back = self._memory.device.give_back
        for page in self.pages[len(self.nodes) :]:
            give_back(page)
        self._memory.tree.release(self.nodes)
        self.pages = array("i")
        self.nodes = []
        self.num_sent = 0
