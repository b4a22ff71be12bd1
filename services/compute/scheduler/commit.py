"""Commit: what a step's result means for the sequences that were in it."""

from __future__ import annotations

from collections.abc import Iterable

from common.messages.tokens import TokenLogprobs
from services.compute.scheduler.draft import LaunchedStep
from services.compute.scheduler.endings import Endings
from services.compute.scheduler.events import EventLog
from services.compute.scheduler.failures import NONFINITE
from services.compute.scheduler.prompt_results import PromptResults
from services.compute.scheduler.residents import Residents
from services.compute.scheduler.sequence import Sequence
from services.compute.step import StepResult


class Committer:
    """Takes results in the order of the steps.

    The rows of a sequence that ended meanwhile are passed over: that is how the token after a
    late EOS or an abort is discarded. No other token ever is; void samples have none.
    """

    __slots__ = ("_endings", "_log", "_prompts", "_residents", "generated_tokens_total")

    def __init__(self, residents: Residents, endings: Endings, log: EventLog) -> None:
        self._residents = residents
        self._endings = endings
        self._log = log
        self._prompts = PromptResults(endings, log)
        self.generated_tokens_total = 0

    def commit(self, step: LaunchedStep, result: StepResult) -> None:
        """Append the step's tokens, end the sequences that stop at theirs, publish full pages."""
        for chunk in step.chunks:
            # A sampled row's last position is counted with its token, as in decode rows. With no
            # other there is nothing to count here; and if void, its sequence may have been
            # preempted since, and have other pages or none.
            computed = chunk.stop - chunk.samples
            if computed > chunk.start and chunk.sequence.live:
                chunk.sequence.computed = computed
        if result.nonfinite.any() or not result.n_valid.all():
            self._fail_invalid(step, result)
        if step.plan.scores or step.plan.pools:
            self._prompts.take(step, result)
        token_S = result.tokens[:, 0]
        tokens = token_S.tolist()
        discarded: list[int] = []
        told: list[int] = []
        draws: Iterable[tuple[Sequence, int, int]]
        draws = zip(step.samples, tokens, range(len(tokens)), strict=True)
        if step.void:
            discarded.extend(step.void)
            draws = (draw for draw in draws if draw[2] not in step.void)
        for sequence, token, sample in draws:
            if not sequence.live:
                discarded.append(sample)
                continue
            sequence.computed += 1
            outputs = sequence.outputs
            outputs.append(token)
            if len(outputs) == sequence.notice or token in sequence.stop_ids:
                if self._notice(sequence, token, result.logprobs.get(sample, ())):
                    told.append(sample)
        routes = self._residents.routes
        self._log.went_on(
            routes.sort(step.slot_S(), step.plan.sample_index, token_S, told + discarded)
        )
        self.generated_tokens_total += len(tokens) - len(discarded)

    def _notice(self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...]) -> bool:
        """Do what not every token needs: end, publish pages, hand on logprobs, open the stream.

        Whether it told of the token: one that only fills a page is like any other.
        """
        table = sequence.table
        table.publish(sequence.page_keys, sequence.computed)
        ending = sequence.ending()
        telling = ending is not None or not sequence.opened or sequence.params.num_logprobs >= 0
        if telling:
            self._log.token(sequence, token, logprobs, ending)
        if ending is not None:
            self._endings.retire(sequence)
            return True
        sequence.set_notice()
        if table.num_sent < len(table.pages):
            self._residents.retabled.append(sequence)
        return telling

    def _fail_invalid(self, step: LaunchedStep, result: StepResult) -> None:
        """Fail the sequences without a valid token, each alone.

        Whatever page made the logits so must not be found again, so its path leaves the tree.
        """
        valid = (result.n_valid > 0) & ~result.nonfinite
        valid[list(step.void)] = True
        for sequence, is_valid in zip(step.samples, valid.tolist(), strict=True):
            if not is_valid and sequence.live:
                sequence.table.distrust()
                self._endings.end(sequence, "failed", NONFINITE)
