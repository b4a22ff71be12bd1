"""The rows of one step, before and after they become a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from services.compute.kv.prefix import Node
from services.compute.scheduler.sequence import Sequence
from services.compute.step import Int32Array, StepPlan


class Chunk(NamedTuple):
    """Known tokens of a sequence; `samples` when they reach the last one and more are wanted."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that one step holds; of the scored ones, those whose prompts have logprobs."""

    tokens: int
    scored_tokens: int


class Draft:
    """What the next step computes. `decodes` may be a list that others share: never change it."""

    __slots__ = ("chunks", "decodes", "num_scored", "published")

    def __init__(self) -> None:
        self.num_scored = 0  # tokens of rows whose prompts are scored
        self.decodes: list[Sequence] = []
        self.chunks: list[Chunk] = []
        # Pages that the chunks fill and that are in the prefix tree already.
        self.published: list[tuple[Sequence, Node]] = []

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


class LaunchedStep:
    """A plan that is with the runner: sample s of its result belongs to `samples[s]`.

    Those in `void` draw nothing: their sequences have been taken back.
    """

    __slots__ = ("chunks", "plan", "published", "samples", "void")

    def __init__(self, plan: StepPlan, samples: list[Sequence], chunks: list[Chunk]) -> None:
        self.plan = plan
        self.samples = samples
        self.chunks = chunks
        self.void: frozenset[int] = frozenset()
        # Pages that entered the prefix tree on its account, before it had a result.
        self.published: list[tuple[Sequence, Node]] = []

    def slot_S(self) -> Int32Array:
        """The slot of each sample."""
        plan = self.plan
        if len(plan.sample_row) == plan.num_rows:  # every row has one
            return plan.row_slot
        return plan.row_slot[plan.sample_row]

    def sequences(self) -> list[Sequence]:
        """Every sequence that has a row in the step, once."""
        prefilling = (chunk.sequence for chunk in self.chunks if not chunk.samples)
        return [*self.samples, *prefilling]
