"""What a transfer of pages is made of, as plain values that can be recorded or sent to other ranks.

Shape legend: P pages, U runs of pages.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from services.compute.step import Int32Array


class Direction(IntEnum):
    """Between the device's pages and the host's."""

    TO_HOST = 1
    TO_DEVICE = 2


class PagePairs(NamedTuple):
    """Page `sources[i]` is copied to page `targets[i]`; no page is a target twice."""

    sources: Int32Array  # [P]
    targets: Int32Array  # [P]

    def runs(self) -> PageRuns:
        """Join pairs that follow one another in both memories."""
        sources, targets = self
        follows = (sources[1:] == sources[:-1] + 1) & (targets[1:] == targets[:-1] + 1)
        first = np.flatnonzero(np.concatenate(((len(sources) > 0,), ~follows)))
        length = np.diff(first, append=len(sources))
        return PageRuns(sources[first], targets[first], length.astype(np.int32))


class PageRuns(NamedTuple):
    """Consecutive pages: `lengths[u]` from `sources[u]` on become those from `targets[u]` on."""

    sources: Int32Array  # [U]
    targets: Int32Array  # [U]
    lengths: Int32Array  # [U]
