"""A policy for which most steps have no drafts."""

from __future__ import annotations

from services.compute.speculative.controller import FixedDrafts
from services.compute.step import NO_IDS, Int32Array


class Seldom(FixedDrafts):
    """Drafts in every so many-th step."""

    every = 15
    num_steps = 0

    def choose(
        self, slots_Q: Int32Array, limits_Q: Int32Array, positions_Q: Int32Array, num_rows: int
    ) -> Int32Array:
        self.num_steps += 1
        if self.num_steps % self.every:
            return NO_IDS
        return super().choose(slots_Q, limits_Q, positions_Q, num_rows)
