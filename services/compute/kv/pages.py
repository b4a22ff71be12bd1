"""The page allocator: which pages of one memory are free. It does not know what is in them."""

from __future__ import annotations


class PagePool:
    """Free pages of one memory (the device's, or the host's swap space), handed out by number.

    Every page is either free or owned by exactly one holder: a sequence's table or the prefix
    tree. Sharing is counted in the tree, where it happens. The last page given back is the first
    handed out again, so that the pages in use stay few and warm.

    A page is free if the free ones have it at the place where it was put last. So nothing is marked
    when pages are taken: a prompt of 100,000 tokens takes 6,250 of them at once.
    """

    __slots__ = ("_free", "_place", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}; it must not be negative")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._place = self._free.copy()  # by page, in `_free`

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take `count` pages, all or none."""
        free = self._free
        if count > len(free):
            return None
        if count == 0:
            return []
        pages = free[-count:]
        del free[-count:]
        pages.reverse()
        return pages

    def give_back(self, page: int) -> None:
        """Free one page; RuntimeError when it is free already, which is always our own bug."""
        if not self.is_used(page):
            raise RuntimeError(f"page {page} is freed twice")
        self._place[page] = len(self._free)
        self._free.append(page)

    def is_used(self, page: int) -> bool:
        place = self._place[page]
        return place >= len(self._free) or self._free[place] != page
