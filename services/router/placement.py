"""Which worker of a service gets the next request: the policy's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take the request.

    `load` counts requests there: its own last word, and what this router placed since.
    """

    instance_id: str
    load: int
    capacity: int


class Placement(Protocol):
    """A pure policy; it may remember what it chose, and nothing else."""

    def choose(self, service: str, candidates: Sequence[Candidate]) -> int:
        """Return the index of the chosen candidate; there is at least one."""
        ...
