"""Keys and values of all sequences in pages on the device, and pages on the host for swapping.

Which page belongs to whom is not known here.

Shape legend: Y layers, N pages, K kv heads, P positions in a page, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PagedCache:
    """Pages of [2, K, P, D] per layer: keys then values, every head's positions together.

    Head-major, because attention is then two batched matrix products over [K, L, D]: in bf16 and
    with one query a head, gathering and these take less than half the time that the CPU flash
    kernel of torch 2.13 takes without gathering (benchmarks/results/cpu_kernels.md).
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        num_pages: int,
        num_host_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shape` is (layers, kv heads, page tokens, head width)."""
        num_layers, kv_heads, page_tokens, head_dim = shape
        self.num_pages = num_pages
        self.kv_heads = kv_heads
        self.page_tokens = page_tokens
        self.head_dim = head_dim
        page = (2, kv_heads, page_tokens, head_dim)
        # empty, not zeros: the system hands out zero pages as they are touched, so that a large
        # cache costs memory only as it fills
        self.device_pages = torch.empty((num_layers, num_pages, *page), dtype=dtype, device=device)
        # pages first: a page is one piece of pinned memory here. A copy between two strided tensors
        # goes through pageable memory, which waits for the device
        self.host_pages = torch.empty(
            (num_host_pages, num_layers, *page),
            dtype=dtype,
            pin_memory=device.type == "cuda" and num_host_pages > 0,
        )
        self._by_head = [
            layer.view(num_pages * 2 * kv_heads, page_tokens * head_dim)
            for layer in self.device_pages
        ]
        self._by_position = [
            layer.view(num_pages * 2 * kv_heads * page_tokens, head_dim)
            for layer in self.device_pages
        ]

    def write(self, layer: int, index: Tensor, rows: Tensor) -> None:
        """Store rows [n, D] at flat positions ((page * 2 + is_value) * K + head) * P + offset."""
        self._by_position[layer].index_copy_(0, index, rows)

    def gather(self, layer: int, index: Tensor, out: Tensor) -> None:
        """Copy heads of pages, (page * 2 + is_value) * K + head, into out [n, P * D]."""
        torch.index_select(self._by_head[layer], 0, index, out=out)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that are about to be filled in part, so that no stale value is ever read.

        A masked score does not help: the NaN that a broken sequence left behind, times a
        probability of zero, is NaN.
        """
        for page in pages:  # one index_fill_ over all took 80 times as long
            self.device_pages[:, page].zero_()

    def swap_out(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy device pages to host pages, (device, host) each."""
        for device_page, host_page in moves:
            self.host_pages[host_page].copy_(self.device_pages[:, device_page], True)

    def swap_in(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy host pages to device pages, (host, device) each."""
        for host_page, device_page in moves:
            self.device_pages[:, device_page].copy_(self.host_pages[host_page], True)
