"""How much of the next product's weight the launches before it ask the L2 cache for.

The asking is in kernels/launch.py. What is asked for too early, or is more than the cache keeps
(50 MB on an H200), is read twice.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ATTENTION_ROWS = 8
"""With more rows attention itself keeps the memory busy."""

MAX_ROWS = 128
"""With more, products wait for their arithmetic rather than for weights."""


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """Bytes of a weight; 0: nothing is asked for."""

    out_bytes: int = 24 << 20  # of attention's output, by the launch before attention
    next_bytes: int = 8 << 20  # by a norm's, an activation's or quantize_rows' launch

    def before_attention(self, num_rows: int) -> int:
        return self.out_bytes if num_rows <= MAX_ATTENTION_ROWS else 0

    def before_product(self, num_rows: int) -> int:
        return self.next_bytes if num_rows <= MAX_ROWS else 0
