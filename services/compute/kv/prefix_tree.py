"""The prefix tree: pages of one kind, found by the tokens that they and all before them hold."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence

NO_PAGE = -1


class Node:
    """One full page: `key` holds its tokens, the path from the root all tokens before them.

    A root is the empty prefix of a namespace, which is its key. A node without a page (`NO_PAGE`)
    only leads to those below it: a window's earlier pages may be evicted before its later ones.
    """

    __slots__ = ("children", "detached", "key", "page", "parent", "refs")

    def __init__(self, key: Hashable, page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[Hashable, Node] = {}
        self.refs = 0
        self.detached = False

    def is_below(self, nodes: Container[Node]) -> bool:
        """Whether these include this node or one above it, detached or not."""
        at: Node | None = self
        while at is not None and at not in nodes:
            at = at.parent
        return at is not None


class PrefixTree:
    """A radix tree over pages, after SGLang's RadixAttention: one node a page, no compressed edges.

    So a lookup is one hash of 64 bytes a page, and a node can be held, shared, evicted and detached
    by itself. Keys are compared, not only hashed. Namespaces (one per cache salt) never meet.

    `refs` counts the sequences that hold a node; where all positions are seen, each of them holds
    every node above it, too. Pages without a holder stay for later requests and are evicted, least
    recently used first.
    """

    __slots__ = ("_give_back", "_held_first", "_idle", "_roots")

    def __init__(self, give_back: Callable[[int], None], held_first: bool = True) -> None:
        self._give_back = give_back
        self._held_first = held_first  # on any path, as where all positions are seen
        self._roots: dict[Hashable, Node] = {}
        # Nodes with no holder, in the order of eviction, and when each was released. `release`
        # appends the deepest node first, so that a hit gets shorter before it is lost.
        self._idle: OrderedDict[Node, int] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        return len(self._idle)

    @property
    def oldest(self) -> int:
        """When the page that is evicted next was released."""
        return next(iter(self._idle.values()))

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

    def has_page(self, namespace: Hashable, parent: Node | None, key: bytes) -> bool:
        above = parent or self._roots.get(namespace)
        node = above.children.get(key) if above else None
        return node is not None and node.page != NO_PAGE

    def num_idle(self, nodes: Sequence[Node]) -> int:
        """Count those of a matched path that would stop being evictable if it were held."""
        if self._held_first:
            return len(nodes) - bisect_left(nodes, True, key=lambda node: not node.refs)
        return sum(not node.refs for node in nodes)

    def hold(self, nodes: Sequence[Node]) -> None:
        idle = self._idle
        for node in nodes:
            if not node.refs:
                del idle[node]
            node.refs += 1

    def lead(self, namespace: Hashable, keys: Iterable[bytes]) -> Node | None:
        """The node at the end of these pages, made without a page where there is none.

        The caller inserts a page below it at once.
        """
        at: Node | None = None
        for key in keys:
            above = at or self._root(namespace)
            at = above.children.get(key)
            if at is None:
                at = above.children[key] = Node(key, NO_PAGE, above)
        return at

    def insert(self, namespace: Hashable, parent: Node | None, key: bytes, page: int) -> Node:
        """Publish a page below `parent`, held once by the caller.

        If these tokens are known already, their node is held instead, and `page` stays the
        caller's.
        """
        above = parent or self._root(namespace)
        node = above.children.get(key)
        if node is None:
            node = above.children[key] = Node(key, page, above)
        elif node.page == NO_PAGE:
            node.page = page
        elif not node.refs:
            del self._idle[node]
        node.refs += 1
        return node

    def release(self, nodes: Sequence[Node], now: int) -> None:
        """Undo one `hold` (or `insert`) of each node of a path, given from the root down."""
        idle = self._idle
        for node in reversed(nodes):
            node.refs -= 1
            if not node.refs:
                if node.detached:
                    self._give_back(node.page)
                else:
                    idle[node] = now

    def evict(self, count: int, until: int | None = None) -> int:
        """Free up to `count` pages without a holder, released by `until`; return how many."""
        idle = self._idle
        evicted = 0
        while evicted < count and idle:
            node, released = idle.popitem(last=False)
            if until is not None and released > until:
                idle[node] = released
                idle.move_to_end(node, last=False)
                break
            self._give_back(node.page)
            if node.children:
                node.page = NO_PAGE
            else:
                self._unlink(node)
            evicted += 1
        return evicted

    def has(self, node: Node) -> bool:
        """Whether a node that is not detached is of this tree."""
        above: Node | None = node
        while above is not None:
            node, above = above, above.parent
        return self._roots.get(node.key) is node

    def detach(self, node: Node) -> None:
        """Make a node and all below it unfindable.

        Pages that are still held are freed when the last holder releases them.
        """
        if node.detached:
            return
        self._unlink(node)
        doubtful = [node]
        while doubtful:
            at = doubtful.pop()
            at.detached = True
            doubtful.extend(at.children.values())
            at.children = {}
            if not at.refs and at.page != NO_PAGE:
                del self._idle[at]
                self._give_back(at.page)

    def _root(self, namespace: Hashable) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, NO_PAGE, None)
        return root

    def _unlink(self, node: Node) -> None:
        """Take a node out of its parent, and what led only to it; an empty namespace is forgotten.

        What is taken out is detached, so that who remembers a path sees it.
        """
        node.detached = True
        above = node.parent
        while above is not None:
            del above.children[node.key]
            if above.children or above.page != NO_PAGE:
                return
            node, above = above, above.parent
            node.detached = True
        del self._roots[node.key]
