"""What a step's result says of prompts: their scores are told, their embeddings end them."""

from __future__ import annotations

from array import array

import numpy as np

from common.messages.failure import Ending
from common.messages.tokens import PromptScores
from services.compute.scheduler.draft import LaunchedStep
from services.compute.scheduler.endings import Endings
from services.compute.scheduler.events import EventLog
from services.compute.scheduler.failures import NONFINITE
from services.compute.scheduler.sequence import Sequence
from services.compute.step import RowScores, StepResult


class PromptResults:
    """Takes the scores and embeddings of results, in the order of the steps.

    What was told before a preemption is not told again, though its pages may have to be computed
    again.
    """

    __slots__ = ("_endings", "_log")

    def __init__(self, endings: Endings, log: EventLog) -> None:
        self._endings = endings
        self._log = log

    def take(self, step: LaunchedStep, result: StepResult) -> None:
        """Tell what is new; numbers that are not finite fail their sequence alone."""
        first_row = step.plan.num_rows - len(step.chunks)
        for score in step.plan.scores:
            chunk = step.chunks[score.row - first_row]
            if chunk.sequence.live:
                self._tell(chunk.sequence, chunk.start, result.scores[score.row])
        for pool in step.plan.pools:
            sequence = step.chunks[pool.row - first_row].sequence
            if not pool.ends or not sequence.live:
                continue
            embedding_E = result.embeddings[pool.row]
            if not np.isfinite(embedding_E).all():
                self._fail(sequence)
                continue
            usage = sequence.usage()
            self._log.ended(sequence, Ending("stop", usage, embedding=embedding_E.tobytes()))
            self._endings.retire(sequence)

    def _tell(self, sequence: Sequence, start: int, scores: RowScores) -> None:
        if not np.isfinite(scores.logprobs).all():
            self._fail(sequence)
            return
        old = max(sequence.num_scored - start, 0)
        first = start + old
        sequence.num_scored = start + len(scores.logprobs)
        self._log.scored(
            sequence,
            PromptScores(
                row=0,
                first=first + 1,
                num_top=scores.top_ids.shape[1],
                ids=_ints(sequence.params.prompt.ids_T[first + 1 : sequence.num_scored + 1]),
                ranks=_ints(scores.ranks[old:]),
                logprobs=array("f", scores.logprobs[old:].tobytes()),
                top_ids=_ints(scores.top_ids[old:]),
                top_logprobs=array("f", scores.top_logprobs[old:].tobytes()),
            ),
        )

    def _fail(self, sequence: Sequence) -> None:
        sequence.table.distrust()
        self._endings.end(sequence, "failed", NONFINITE)


def _ints(values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> array[int]:
    return array("i", values.tobytes())
