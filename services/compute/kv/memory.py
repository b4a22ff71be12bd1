"""KV memory as a whole: device pages, host pages for swapping, and the tree of shared pages."""

from __future__ import annotations

from services.compute.kv.pages import PagePool
from services.compute.kv.prefix import PrefixTree


class KVMemory:
    """All pages of one runner. An evictable page of the tree counts as available."""

    __slots__ = ("device", "host", "page_tokens", "tree")

    def __init__(self, num_pages: int, num_host_pages: int, page_tokens: int) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens is {page_tokens}; it must be positive")
        self.page_tokens = page_tokens
        self.device = PagePool(num_pages)
        self.host = PagePool(num_host_pages)
        self.tree = PrefixTree(self.device)

    @property
    def num_available(self) -> int:
        """Device pages that `take` could hand out."""
        return self.device.num_free + self.tree.num_evictable

    def take(self, count: int) -> list[int] | None:
        """Take device pages, all or none, evicting from the tree where none are free."""
        missing = count - self.device.num_free
        if missing > 0:
            if missing > self.tree.num_evictable:
                return None
            self.tree.evict(missing)
        return self.device.take(count)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages this many positions need."""
        return -(-num_tokens // self.page_tokens)
