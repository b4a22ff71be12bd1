"""Pages on their way between device and host, to be ordered with the next plan."""

from __future__ import annotations

from services.compute.kv.pages import PagePool

PagePairs = tuple[tuple[int, int], ...]


class Transfers:
    """Swaps that the next plan carries; the device does them before its forward pass.

    So a device page that is swapped out may be given away at once: whoever writes to it does so
    in that plan's forward pass or later. A host page that is swapped in is free only after the
    plan, whose swap-outs come first.
    """

    __slots__ = ("_host", "_into_device", "_out_to_host", "_spent")

    def __init__(self, host: PagePool) -> None:
        self._host = host
        self._out_to_host: list[tuple[int, int]] = []
        self._into_device: list[tuple[int, int]] = []
        self._spent: list[int] = []

    def swap_out(self, device_pages: list[int], host_pages: list[int]) -> None:
        """Copy device pages to host pages."""
        self._out_to_host.extend(zip(device_pages, host_pages, strict=True))

    def swap_in(self, host_pages: list[int], device_pages: list[int]) -> None:
        """Copy host pages to device pages."""
        self._into_device.extend(zip(host_pages, device_pages, strict=True))

    def spend(self, host_pages: list[int]) -> None:
        """Free these host pages once the next plan is made."""
        self._spent.extend(host_pages)

    def drop(self, host_pages: list[int]) -> None:
        """Free host pages that nobody will read: copies to them that still wait are cancelled."""
        if self._out_to_host:
            dropped = set(host_pages)
            self._out_to_host = [pair for pair in self._out_to_host if pair[1] not in dropped]
        for page in host_pages:
            self._host.give_back(page)

    def take(self) -> tuple[PagePairs, PagePairs]:
        """Hand over (swap_out, swap_in) for the plan being made."""
        if not self._out_to_host and not self._spent:
            return (), ()
        taken = tuple(self._out_to_host), tuple(self._into_device)
        self._out_to_host = []
        self._into_device = []
        for page in self._spent:
            self._host.give_back(page)
        self._spent = []
        return taken
