"""Commit: what a step's result means for the sequences that were in it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from common.messages.arrays import uint32s
from common.messages.failure import Ending, Failure
from common.messages.logprobs import Logprobs, PromptLogprobs
from common.messages.tokens import TokenLogprobs
from services.compute.scheduler.drafting import Drafting
from services.compute.scheduler.sequence import Chunk, LaunchedStep, Sequence
from services.compute.scheduler.state import SchedulerState
from services.compute.step import Int32Array, RowScores, StepResult, int32_array

NONFINITE = Failure(  # another replica tells whether it is this one or the request
    500,
    "nonfinite_logits",
    "The model's logits for this request were not finite numbers.",
    retryable=True,
)


class Committer:
    """Takes results in the order of the steps.

    Rows of a sequence that ended meanwhile are passed over: so the token after a late EOS or an
    abort is discarded, and no other ever is.
    """

    def __init__(self, state: SchedulerState, drafting: Drafting | None = None) -> None:
        self._state = state
        self._drafting = drafting
        self.generated_tokens_total = 0
        self.nonfinite_requests_total = 0

    def commit(self, step: LaunchedStep, result: StepResult) -> None:
        """Append the step's tokens, end the sequences that stop at theirs, publish full pages."""
        self._count_chunks(step.chunks)
        if result.nonfinite.any() or not result.n_valid.all():
            self._fail_invalid(step, result)
        if step.plan.scores or step.plan.pools:
            self._take_prompt_results(step, result)
        index_S, token_S = step.plan.sample_index, np.ascontiguousarray(result.tokens[:, 0])
        discarded: list[int] = []
        reported: list[int] = []  # with an output of their own
        if self._drafting is not None:
            self._drafting.settle(step, result)
            index_S = int32_array([len(sequence.outputs) for sequence in step.samples])
            if len(step.plan.num_drafts):
                reported = self._take_several(step, result)
        tokens = token_S.tolist()
        draws: Iterable[tuple[Sequence, int, int]]
        draws = zip(step.samples, tokens, range(len(tokens)), strict=True)
        if step.skipped or reported:
            discarded.extend(step.skipped)
            passed = step.skipped.union(reported)
            draws = (draw for draw in draws if draw[2] not in passed)
        for sequence, token, sample in draws:
            if not sequence.live:
                discarded.append(sample)
                continue
            sequence.num_computed_tokens += 1
            outputs = sequence.outputs
            outputs.append(token)
            if len(outputs) == sequence.check_at or token in sequence.stop_ids:
                if self._check(sequence, token, result.logprobs.get(sample, ())):
                    reported.append(sample)
        routes = self._state.running.routes
        self._state.outputs += routes.sort(step.slot_S(), index_S, token_S, reported + discarded)
        self.generated_tokens_total += len(tokens) - len(discarded)

    @staticmethod
    def _count_chunks(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            # A sampled row's last position is counted with its token, as in decode rows. If that
            # is all, and it was skipped, its sequence may have been preempted since.
            computed = chunk.stop - chunk.samples
            if computed > chunk.start and chunk.sequence.live:
                chunk.sequence.num_computed_tokens = computed
                chunk.sequence.charge()

    def _take_several(self, step: LaunchedStep, result: StepResult) -> list[int]:
        """Append what rows gave that had drafts, up to an end; return their samples.

        Each token has an output of its own, which says what became of drafts up to there.
        """
        samples = np.flatnonzero((result.n_valid > 1) | (result.num_offered > 0)).tolist()
        samples = [s for s in samples if step.samples[s].live and s not in step.skipped]
        for sample in samples:
            sequence, num_before = step.samples[sample], len(step.samples[sample].outputs)
            logprobs = result.logprobs.get(sample, ())
            for number, token in enumerate(
                result.tokens[sample, : result.n_valid[sample]].tolist()
            ):
                own = logprobs[number : number + 1]
                sequence.num_computed_tokens += 1
                sequence.num_accepted += number > 0
                sequence.outputs.append(token)
                checks = len(sequence.outputs) == sequence.check_at or token in sequence.stop_ids
                if not (checks and self._check(sequence, token, own)):
                    self._state.report(sequence, (token,), own)
                if not sequence.live:
                    break
            self.generated_tokens_total += len(sequence.outputs) - num_before - 1
        return samples

    def _check(self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...]) -> bool:
        """Do what few tokens need: end, publish pages, hand on logprobs, open the stream.

        Returns whether the token has an output of its own; one that only fills a page has none.
        """
        table = sequence.table
        table.publish(sequence.page_keys, sequence.num_computed_tokens)
        sequence.charge()
        ending = sequence.ending()
        reports = ending is not None or not sequence.opened or sequence.params.num_logprobs >= 0
        if reports:
            self._state.report(sequence, (token,), logprobs, ending)
        if ending is not None:
            self._state.retire(sequence)
            return True
        sequence.set_check()
        if table.has_unsent:
            self._state.running.dirty_tables.append(sequence)
        return reports

    def _take_prompt_results(self, step: LaunchedStep, result: StepResult) -> None:
        first_row = step.plan.num_rows - len(step.chunks)
        for score in step.plan.scores:
            chunk = step.chunks[score.row - first_row]
            if chunk.sequence.live:
                self._take_scores(chunk.sequence, chunk.start, result.scores[score.row])
        for pool in step.plan.pools:
            sequence = step.chunks[pool.row - first_row].sequence
            if not pool.ends or not sequence.live:
                continue
            embedding_E = result.embeddings[pool.row]
            if not np.isfinite(embedding_E).all():
                self._fail_nonfinite(sequence)
                continue
            ending = Ending("stop", sequence.usage(), embedding=embedding_E.tobytes())
            self._state.report(sequence, ending=ending)
            self._state.retire(sequence)

    def _take_scores(self, sequence: Sequence, start: int, scores: RowScores) -> None:
        """Hand on scores, but not again those that were computed before a preemption, too."""
        if not np.isfinite(scores.logprobs).all():
            self._fail_nonfinite(sequence)
            return
        old = max(sequence.num_scored - start, 0)
        first = start + old
        sequence.num_scored = start + len(scores.logprobs)
        targets = sequence.params.prompt_T[first + 1 : sequence.num_scored + 1]
        scored = _prompt_logprobs(first + 1, targets, scores, old)
        ending = None if sequence.has_to_score(sequence.num_scored) else sequence.ending()
        self._state.report(sequence, ending=ending, scored=(scored,))
        if ending is not None:  # a retry that lacked nothing but scores
            self._state.retire(sequence)

    def _fail_invalid(self, step: LaunchedStep, result: StepResult) -> None:
        valid = (result.n_valid > 0) & ~result.nonfinite
        valid[list(step.skipped)] = True
        for sequence, is_valid in zip(step.samples, valid.tolist(), strict=True):
            if not is_valid and sequence.live:
                self._fail_nonfinite(sequence)

    def _fail_nonfinite(self, sequence: Sequence) -> None:
        # The page that caused it must not be found again, so its path leaves the tree.
        sequence.table.distrust()
        if not sequence.params.nonfinite:  # its choices count as one
            sequence.params.nonfinite = True
            self.nonfinite_requests_total += 1
        self._state.end(sequence, "failed", NONFINITE)


def _prompt_logprobs(
    first: int, target_P: Int32Array, scores: RowScores, start: int
) -> PromptLogprobs:
    """Put each target before its most likely rivals; scores before `start` are left out."""
    columns = (target_P[:, None], scores.top_ids[start:])
    ids_PC = np.concatenate(columns, axis=1, dtype=np.int32)
    scored = (scores.logprobs[start:, None], scores.top_logprobs[start:])
    values_PC = np.concatenate(scored, axis=1, dtype=np.float32)
    logprobs = Logprobs(
        uint32s((ids_PC.shape[1],)) * len(target_P),
        array("I", scores.ranks[start:].tobytes()),
        array("i", ids_PC.tobytes()),
        array("f", values_PC.tobytes()),
    )
    return PromptLogprobs(0, first, logprobs)
