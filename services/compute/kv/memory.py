"""KV memory: one pool of pages, from which every kind of cache takes its own."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.kv.prefix_tree import Node, PrefixTree

KINDS = ("full", "window", "mla")


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one page table: pages of `page_tokens` positions, `page_bytes` in all.

    All groups of a model have pages of one size, so that they draw from one pool.
    """

    kind: Literal["full", "window", "mla", "state"]
    num_layers: int
    page_tokens: int
    page_bytes: int
    span: AttentionSpan = FULL  # what a query sees


class PagePool:
    """The free pages of one memory: the device's, or the host's swap space.

    Every page is either free or owned by exactly one holder: a sequence's table or the prefix
    tree. Sharing is counted in the tree, where it happens. The page given back last is handed out
    first, so that the pages in use stay few and warm.

    A leased page is one that a transfer still reads or writes. Its owner may give it back all the
    same: then nobody has it, and it is free when its last lease has ended.

    `_place` says where in `_free` each page was put last: it is free if it is still there. So
    taking pages marks nothing. With arrays, the 8,192 pages of a prompt of 128k tokens are one
    copy of 32 KB; in a list they are as many objects, each of which has to be touched.
    """

    __slots__ = (
        *("_arriving", "_free", "_leases", "_place", "_returned", "num_free", "num_pages"),
    )

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}; it must not be negative")
        self.num_pages = self.num_free = num_pages
        self._free = array("i", range(num_pages))  # the first `num_free` of them
        self._place = self._free[:]
        self._leases: dict[int, int] = {}  # by page: most often there is one
        self._returned: set[int] = set()  # of these, without an owner
        self._arriving: set[int] = set()  # of these, written to for the owner

    @property
    def num_read(self) -> int:
        """Pages with an owner that a transfer reads."""
        return len(self._leases) - len(self._returned) - len(self._arriving)

    @property
    def num_returned(self) -> int:
        """Pages without an owner that come free when their leases end."""
        return len(self._returned)

    def take(self, count: int) -> array[int] | None:
        num_left = self.num_free - count
        if num_left < 0:
            return None
        pages = self._free[num_left : self.num_free]
        self.num_free = num_left
        return pages

    def give_back(self, page: int) -> None:
        """Free one page, or when its leases end; RuntimeError if it has been given back already."""
        if not self.is_used(page):
            raise RuntimeError(f"page {page} is freed twice")
        if self._leases and page in self._leases:
            self._returned.add(page)
            self._arriving.discard(page)
            return
        self._place[page] = self.num_free
        self._free[self.num_free] = page
        self.num_free += 1

    def lease(self, pages: Iterable[int], arriving: bool) -> None:
        """Hand none of these pages out again before as many calls of `end_lease`.

        `arriving` says that they are written, and not read.
        """
        leases = self._leases
        for page in pages:
            leases[page] = leases.get(page, 0) + 1
        if arriving:
            self._arriving.update(pages)

    def end_lease(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._leases[page] -= 1
            if not self._leases[page]:
                del self._leases[page]
                self._arriving.discard(page)
                if page in self._returned:
                    self._returned.remove(page)
                    self.give_back(page)

    def is_used(self, page: int) -> bool:
        """Whether a page has an owner."""
        place = self._place[page]
        was_taken = place >= self.num_free or self._free[place] != page
        return was_taken and page not in self._returned


class PageBundles:
    """Pages that are taken and freed `width` at a time; a bundle goes by the first of them."""

    def __init__(self, pool: PagePool, width: int) -> None:
        self._give_back = pool.give_back
        self._width = width
        self._pages_of = np.zeros((pool.num_pages, width), dtype=np.int32)

    def tie(self, pages: array[int]) -> array[int]:
        if len(pages) == self._width:
            self._pages_of[pages[0]] = pages
            return pages[:1]
        bundles = np.frombuffer(pages, dtype=np.int32).reshape(-1, self._width)
        firsts = bundles[:, 0]
        self._pages_of[firsts] = bundles
        return array("i", firsts.tobytes())

    def pages_of(self, bundles: array[int]) -> array[int]:
        return array("i", self._pages_of[bundles].tobytes())

    def give_back(self, bundle: int) -> None:
        for page in self._pages_of[bundle].tolist():
            self._give_back(page)


class PageKind:
    """Groups whose layers see the same positions, so that their page tables move in lockstep.

    An entry of the table that they share is `width` pages, one of each group, and goes by the
    first of them: for a single group it is just that page.

    Of a window or a chunk a sequence keeps what its next query sees, and at least the page before
    that query's own: there the prefix tree goes on.
    """

    def __init__(
        self, memory: KVMemory, number: int, groups: Sequence[int], span: AttentionSpan
    ) -> None:
        page_tokens = memory.page_tokens
        self.memory = memory
        self.number = number
        self.groups: npt.NDArray[np.int32] = np.array(groups, dtype=np.int32)
        self.width = len(groups)
        self.span = span
        self.page_tokens = page_tokens
        self._reach = max(span.size, page_tokens + 1)
        self._bundles = PageBundles(memory.device, self.width) if self.width > 1 else None
        self.give_back = (self._bundles or memory.device).give_back
        self.tree = PrefixTree(self.give_back, held_first=span.is_full)

    def take(self, count: int) -> array[int] | None:
        pages = self.memory.take(count * self.width)
        if pages is None or self._bundles is None:
            return pages
        return self._bundles.tie(pages)

    def pages_of(self, entries: array[int]) -> array[int]:
        """All pages of these entries, entry by entry."""
        return entries if self._bundles is None else self._bundles.pages_of(entries)

    def entries_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def first_entry(self, position: int) -> int:
        """The first entry that queries from `position` on need."""
        seen = self.span.first_position(position)
        return max(min(seen, position - self.page_tokens), 0) // self.page_tokens

    def most_entries(self, num_tokens: int, max_chunk: int) -> int:
        """Most entries that a sequence of this length holds at once, computed in such chunks."""
        # What the first query may see, the rest of the chunk, and one position that a structured
        # sample may go back: at worst the first of these is the last of its page.
        most = (self._reach + max_chunk + self.page_tokens - 2) // self.page_tokens + 1
        return min(self.entries_for(num_tokens), most)


class KVMemory:
    """All pages of one runner. An evictable page of any kind counts as available.

    A page means the same memory whichever group has it: all groups' pages are of one size.
    """

    def __init__(self, num_pages: int, num_host_pages: int, groups: Sequence[KVGroup]) -> None:
        self.page_tokens = _check_groups(groups)
        self.num_groups = len(groups)
        self.device = PagePool(num_pages)
        self.host = PagePool(num_host_pages)
        self.now = 0  # counts releases: pages of several kinds are evicted in one order
        members: dict[AttentionSpan, list[int]] = defaultdict(list)
        for number, group in enumerate(groups):
            members[group.span].append(number)
        # The kind that sees all positions comes first: it says best how long a hit can be.
        self.kinds = tuple(
            PageKind(self, number, members[span], span)
            for number, span in enumerate(sorted(members, key=lambda span: -span.size))
        )

    @property
    def num_available(self) -> int:
        """Pages that can be taken now, at least.

        Evicting a page that a transfer reads frees nothing yet. How many of those are evictable is
        not known, so all of them are taken off, though sequences may hold some.
        """
        return max(self._num_free_or_evictable - self.device.num_read, 0)

    @property
    def num_expected(self) -> int:
        """Pages that can be taken when all leases have ended."""
        return self._num_free_or_evictable + self.device.num_returned

    @property
    def _num_free_or_evictable(self) -> int:
        available = self.device.num_free
        for kind in self.kinds:
            available += kind.width * kind.tree.num_evictable
        return available

    def take(self, count: int) -> array[int] | None:
        """Take device pages, all or none, evicting from the trees where none are free."""
        device = self.device
        if count > device.num_free:
            if count > self.num_available:
                return None
            while count > device.num_free:  # again where what was evicted is leased
                self._evict(count - device.num_free)
        return device.take(count)

    def flush(self) -> int:
        """Forget all pages without a holder; return how many there were."""
        return sum(kind.width * kind.tree.evict(kind.tree.num_evictable) for kind in self.kinds)

    def detach(self, node: Node) -> None:
        """Make a node of any kind unfindable, and all below it."""
        if node.detached:
            return
        *others, last = self.kinds
        kind = next((kind for kind in others if kind.tree.has(node)), last)
        kind.tree.detach(node)

    def most_pages(self, num_tokens: int, max_chunk: int) -> int:
        """Most pages that a sequence of this length holds at once, computed in such chunks."""
        return sum(kind.width * kind.most_entries(num_tokens, max_chunk) for kind in self.kinds)

    def longest_sequence(self, max_model_len: int, max_chunk: int) -> int:
        """The most positions, up to a model's limit, that one sequence can have alone."""
        lengths = range(0, max_model_len + self.page_tokens, self.page_tokens)
        most = bisect_right(
            lengths, self.device.num_pages, key=lambda n: self.most_pages(n, max_chunk)
        )
        return lengths[most - 1]

    def _evict(self, num_pages: int) -> None:
        while num_pages > 0:
            idle = [kind for kind in self.kinds if kind.tree.num_evictable]
            idle.sort(key=lambda kind: kind.tree.oldest)
            oldest, until = idle[0], idle[1].tree.oldest if len(idle) > 1 else None
            num_entries = -(-num_pages // oldest.width)
            num_pages -= oldest.width * oldest.tree.evict(num_entries, until)


def _check_groups(groups: Sequence[KVGroup]) -> int:
    """Return the tokens of a page; ValueError for groups that cannot share one pool of pages."""
    for group in groups:
        if group.kind not in KINDS:
            raise ValueError(f"cache groups of kind {group.kind!r} are not supported yet")
        if (group.kind == "window") is group.span.is_full:
            raise ValueError(f"a cache group of kind {group.kind!r} has a {group.span}")
    page_tokens = {group.page_tokens for group in groups}
    if len(page_tokens) != 1 or min(page_tokens) < 1:
        raise ValueError(f"page_tokens of the cache groups must be one positive number: {groups}")
    if len({group.page_bytes for group in groups}) > 1:
        raise ValueError(f"page_bytes of the cache groups differ: {groups}")
    return page_tokens.pop()
