"""The prefix tree: full pages of computed positions, found again by the tokens before them."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence


class Node:
    """One full page: `key` holds its tokens, the path from the root all tokens before them."""

    __slots__ = ("children", "detached", "key", "page", "parent", "refs")

    def __init__(self, key: bytes, page: int, parent: Node | Root) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        self.detached = False


class Root:
    """The empty prefix of one namespace."""

    __slots__ = ("children", "namespace")

    def __init__(self, namespace: Hashable) -> None:
        self.namespace = namespace
        self.children: dict[bytes, Node] = {}


class PrefixTree:
    """A radix tree over pages, after SGLang's RadixAttention: one edge is one page of tokens.

    One node a page, not compressed edges: a lookup is one hash of 64 bytes a page, and there is
    no splitting, so a node can be held, shared, evicted and detached by itself. Namespaces (one
    per cache salt) never meet.

    `refs` counts the sequences that hold a node; each of them holds every node above it, too.
    Pages without a holder stay for later requests and are evicted, least recently used first.
    """

    __slots__ = ("_give_back", "_idle", "_roots")

    def __init__(self, give_back: Callable[[int], None]) -> None:
        self._give_back = give_back
        self._roots: dict[Hashable, Root] = {}
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
        """Find the longest known prefix of these pages, below `above` if there is one; the nodes
        are not held yet."""
        found: list[Node] = []
        at: Node | Root | None = self._roots.get(namespace) if above is None else above
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
        """Keep a matched path from eviction for one more sequence."""
        idle = self._idle
        for node in nodes:
            if not node.refs:
                del idle[node]
            node.refs += 1

    def insert(self, namespace: Hashable, parent: Node | None, key: bytes, page: int) -> Node:
        """Publish a page below `parent`, held once by the caller.

        If these tokens are known already, the node that was there is held instead; its page is
        then not `page`, which stays the caller's to give back.
        """
        above: Node | Root
        if parent is not None:
            above = parent
        else:
            root = self._roots.get(namespace)
            if root is None:
                root = self._roots[namespace] = Root(namespace)
            above = root
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
                    self._give_back(node.page)
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
            self._give_back(node.page)
            evicted += 1
        return evicted

    def flush(self) -> int:
        """Free every page without a holder; return how many there were."""
        return self.evict(len(self._idle))

    def detach(self, node: Node) -> list[Node]:
        """Make a node and all below it unfindable: what is in its page is not to be trusted.

        Held pages among them are freed when their last holder lets go. Returns the nodes that
        are still held.
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
                self._give_back(at.page)
        return still_held

    def nodes(self) -> Iterator[Node]:
        """Walk over all findable nodes, parents first (for tests and statistics)."""
        below = [node for root in self._roots.values() for node in root.children.values()]
        while below:
            node = below.pop()
            yield node
            below.extend(node.children.values())

    def _unlink(self, node: Node) -> None:
        """Take a node out of its parent; a namespace without pages is forgotten."""
        above = node.parent
        del above.children[node.key]
        if isinstance(above, Root) and not above.children:
            del self._roots[above.namespace]
