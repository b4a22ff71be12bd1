"""The scheduler: continuous batching over paged KV memory, one step ahead of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from common.messages.address import AttemptId
from common.messages.control import DraftReport
from common.messages.failure import EndReason, Failure
from common.messages.generate import Generate
from services.compute.kv.memory import KVMemory
from services.compute.kv.prefix_tree import Node
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.commit import Committer
from services.compute.scheduler.drafting import Drafting, DraftPolicy
from services.compute.scheduler.intake import Intake
from services.compute.scheduler.outputs import Output
from services.compute.scheduler.packing import Packer
from services.compute.scheduler.planner import Planner
from services.compute.scheduler.policies import BatchView, SchedulingPolicy
from services.compute.scheduler.sequence import LaunchedStep, Sequence, Status
from services.compute.scheduler.state import SchedulerSettings, SchedulerState, by_order
from services.compute.scheduler.transfers import Transfer
from services.compute.step import ForcedTokens, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts for heartbeats and metrics."""

    num_waiting: int
    num_running: int
    num_swapped: int  # or on their way back
    num_slots: int  # most that can run
    max_prefill_tokens: int  # of a step
    pages_total: int
    pages_free: int  # never used or evictable at once
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    started_total: int  # sequences that have run
    nonfinite_requests_total: int
    drafts_total: int = 0  # that the device had, where steps had rows for them
    accepted_drafts_total: int = 0
    drafts: tuple[DraftReport, ...] = ()


class Scheduler:
    """Synchronous and pure, given the clock; `policy` says which work goes first.

    The engine calls `plan` for step n+1 before `commit` of step n; plans are committed in order.
    Outputs, of aborts and refusals too, wait here until `drain_outputs`. This class has the steps
    in flight; the rules are in its parts.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        settings: SchedulerSettings,
        policy: SchedulingPolicy,
        draft_policy: DraftPolicy | None = None,
    ) -> None:
        num_slots = min(settings.max_num_seqs, spec.max_num_seqs, spec.max_step_tokens)
        memory = KVMemory(spec.num_pages, spec.num_host_pages, spec.kv_groups)
        self._policy = policy
        self._max_num_seqs = num_slots
        self._max_prefill_tokens = min(settings.max_prefill_tokens, spec.max_step_tokens)
        self._max_in_flight = settings.in_flight_steps
        self.foresees = draft_policy is not None and settings.forced_drafts
        self._state = state = SchedulerState(memory, settings, num_slots)
        self._intake = Intake(state, spec, settings)
        self._packer = Packer(state, num_slots, gives_tokens=settings.num_groups > 1)
        self._drafting: Drafting | None = None
        if draft_policy is not None:
            self._drafting = Drafting(state, self._packer, draft_policy, spec)
        self._planner = Planner(state, spec, settings, self._drafting)
        self._committer = Committer(state, self._drafting)
        self._in_flight: deque[LaunchedStep] = deque()
        self._unpublished: LaunchedStep | None = None
        self._next_step_id = 0

    def add_request(self, request: Generate, now_s: float) -> None:
        self._intake.add_request(request, now_s)

    def abort(self, attempt: AttemptId, now_s: float) -> bool:
        """End one attempt; one that is not open is refused should it still come."""
        sequence = self._state.attempts.get(attempt)
        if sequence is None:
            self._state.attempts.tombstones.bury(attempt, now_s)
            return False
        self._state.end(sequence, "aborted")
        return True

    def foresee(self, forced: Iterable[ForcedTokens]) -> None:
        """Take tokens that must come; if it `foresees`, the next steps compute several at once."""
        if self._drafting is not None and self.foresees:
            self._drafting.foresee(forced)

    def device_waited(self, seconds: float) -> None:
        """There was work, and the device had none for so long before a step."""
        if self._drafting is not None:
            self._drafting.waited(seconds)

    def plan(self, now_s: float) -> StepPlan | None:
        """Plan the next step.

        None if nothing can run before a result, a request, the end of a transfer or `wake_at_s`.
        """
        if len(self._in_flight) > self._max_in_flight:
            return None
        self._publish_launched()
        quotas = self._policy.quotas(self._view(), now_s)
        draft = self._planner.draft(quotas, self._next_step_id, now_s)
        if not draft:
            return None
        step_id = self._next_step_id
        self._next_step_id += 1
        step = self._packer.pack(draft, step_id)
        if self._drafting is not None:
            self._drafting.begin(step.plan.slots)
        self._in_flight.append(step)
        self._unpublished = step
        return step.plan

    def take_transfers(self) -> list[Transfer]:
        """Take what has to be copied since the last call, before the plan just made is launched.

        There may be some without a plan. Each is told of again: `transferred` or `transfer_failed`.
        """
        return self._state.transfers.take()

    def transferred(self, transfer: Transfer) -> None:
        self._planner.transferred(transfer.number)

    def transfer_failed(self, transfer: Transfer) -> None:
        """The runner raised before it copied anything."""
        self._planner.transfer_failed(transfer.number)

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Take the result of the oldest step in flight; ValueError if it is another's."""
        if not self._in_flight or self._in_flight[0].plan.step_id != plan.step_id:
            raise ValueError(f"step {plan.step_id} is not the oldest one in flight")
        if result.step_id != plan.step_id:
            raise ValueError(f"step {plan.step_id} got the result of step {result.step_id}")
        step = self._in_flight.popleft()
        if step is self._unpublished:
            self._publish_launched()
        self._committer.commit(step, result)

    def live_samples(self, plan: StepPlan, samples: Iterable[int]) -> list[int]:
        sequences = self._step(plan).samples
        return [sample for sample in samples if sequences[sample].live]

    def reschedule(self, plan: StepPlan, samples: Iterable[int]) -> None:
        """Skip samples of the only step in flight: they draw nothing and are planned again."""
        step = self._step(plan)
        if len(self._in_flight) > 1:
            raise ValueError(f"step {plan.step_id} is not the only one in flight")
        for sample in samples:
            sequence = step.samples[sample]
            if sequence.live and sample not in step.skipped:
                num_drafts = int(plan.num_drafts[sample]) if sample < len(plan.num_drafts) else 0
                self._packer.reject(sequence, num_drafts, 0)
                self._packer.reschedule(sequence)
        step.skipped = step.skipped.union(samples)

    def fail_samples(self, plan: StepPlan, failures: Mapping[int, Failure]) -> None:
        sequences = self._step(plan).samples
        for sample, failure in failures.items():
            if sequences[sample].live:
                self._state.end(sequences[sample], "failed", failure)

    def fail_slots(self, slots: Container[int], failure: Failure) -> dict[AttemptId, str]:
        """End the owners of slots whose settings the device could not take.

        Their rows are computed all the same, since others may read the pages that those fill.
        Returns the attempts that it ended, with the traceparent of each.
        """
        return self._fail([s for s in self._state.running if s.slot in slots], failure)

    def fail_step(self, plan: StepPlan, failure: Failure, now_s: float) -> dict[AttemptId, str]:
        """The step broke: end the sequences in it and those that read its pages; return them."""
        step = self._step(plan)
        if step is self._unpublished:
            self._unpublished = None
        running = self._state.running
        # With pages that have been on the host since the step was planned, too.
        failing = {s for s in running if s.swap_step > plan.step_id and s.status is Status.RUNNING}
        failing.update(step.sequences())
        readers = failing
        while readers:  # of their pages, of the pages of those that read them, and so on
            readers = self._readers(self._distrust(plan.step_id, readers)) - failing
            failing |= readers
        self._in_flight.remove(step)
        ended = self._fail(sorted(failing, key=by_order), failure)
        self._planner.recompute_swapped(plan.step_id)
        running.resend(plan.slots)
        return ended

    def end_all(self, matches: Callable[[Generate], bool], reason: EndReason, now_s: float) -> None:
        for sequence in list(self._state.attempts):
            if matches(sequence.params.request):
                self._state.end(sequence, reason)

    def drain_outputs(self) -> list[Output]:
        """Take the outputs since the last call; those of one attempt are in order."""
        drained, self._state.outputs = self._state.outputs, []
        return drained

    def is_open(self, attempt: AttemptId) -> bool:
        return self._state.attempts.get(attempt) is not None

    def open_attempts(self, router: str) -> list[int]:
        return self._state.attempts.counters(router)

    def has_work(self) -> bool:
        return bool(self._state.attempts)

    def wake_at_s(self) -> float | None:
        """When `plan` may find something to run though nothing has happened."""
        return self._policy.wake_at_s()

    def stats(self) -> SchedulerStats:
        state, planner = self._state, self._planner
        drafts = None if self._drafting is None else self._drafting.counts
        num_swapped = sum(s.status is Status.SWAPPED for s in state.waiting)
        num_loading = sum(s.status is Status.LOADING for s in state.running)
        return SchedulerStats(
            num_waiting=state.num_waiting - num_swapped,
            num_running=len(state.running) - num_loading,
            num_swapped=num_swapped + num_loading,
            num_slots=self._max_num_seqs,
            max_prefill_tokens=self._max_prefill_tokens,
            pages_total=state.memory.device.num_pages,
            pages_free=state.memory.num_available,
            prompt_tokens_total=planner.prompt_tokens_total,
            cached_tokens_total=planner.cached_tokens_total,
            generated_tokens_total=self._committer.generated_tokens_total,
            preemptions_total=planner.preemptions_total,
            started_total=planner.num_started_total,
            nonfinite_requests_total=self._committer.nonfinite_requests_total,
            drafts_total=0 if drafts is None else drafts.num_offered,
            accepted_drafts_total=0 if drafts is None else drafts.num_right,
            drafts=() if drafts is None else drafts.reports(),
        )

    def queue(self) -> tuple[int, float | None]:
        """Count the tokens of sequences that wait; return when the oldest new one came, if any."""
        waiting = list(self._state.waiting)
        came_s = (each.params.arrived_at_s for each in waiting if not each.has_run)
        return sum(each.num_tokens for each in waiting), min(came_s, default=None)

    def flush_prefix_cache(self) -> int:
        """Forget prefixes, and what was answered; returns how many pages are free by it."""
        if self._state.past_answers is not None:
            self._state.past_answers.clear()
        return self._state.memory.flush()

    def _step(self, plan: StepPlan) -> LaunchedStep:
        return next(step for step in self._in_flight if step.plan.step_id == plan.step_id)

    def _fail(self, sequences: Iterable[Sequence], failure: Failure) -> dict[AttemptId, str]:
        ended = {}
        for sequence in sequences:
            if sequence.live:
                ended[sequence.attempt] = sequence.params.request.traceparent
                self._state.end(sequence, "failed", failure)
        return ended

    def _view(self) -> BatchView:
        state, waiting = self._state, self._state.waiting
        return BatchView(
            num_running=len(state.running.sequences),
            num_new=len(waiting) - waiting.num_resumable + state.forks.num_parked,
            num_resumable=waiting.num_resumable,
            num_started_total=self._planner.num_started_total,
            max_num_seqs=self._max_num_seqs,
            max_prefill_tokens=self._max_prefill_tokens,
        )

    def _publish_launched(self) -> None:
        """The step planned last is on the device: what its chunks filled is settled.

        Most of their pages are shared since it was planned. Now those of structured samples are,
        and pages that another sequence has published before take the place of its own.
        """
        step, self._unpublished = self._unpublished, None
        if step is None:
            return
        skipped = {step.samples[sample] for sample in step.skipped}
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.live:
                # A position that will be computed again writes to its page, so that is not shared.
                self._publish(step, sequence, chunk.stop - (sequence in skipped))

    def _distrust(self, broken_id: int, sequences: set[Sequence]) -> set[Node]:
        """Hide what these have published in a broken step or since, and return it."""
        steps = (step for step in self._in_flight if step.plan.step_id >= broken_id)
        published = [n for step in steps for s, n in step.published if s in sequences]
        for node in published:
            self._state.memory.detach(node)
        return set(published)

    def _readers(self, doubtful: set[Node]) -> set[Sequence]:
        """Those that have read these pages; of those that have ended, what published others."""
        publishers = (sequence for step in self._in_flight for sequence, _ in step.published)
        sequences = {*self._state.running, *publishers}
        return {s for s in sequences if any(tip.is_below(doubtful) for tip in s.table.tips)}

    def _publish(self, step: LaunchedStep, sequence: Sequence, num_tokens: int) -> None:
        table = sequence.table
        step.published += [(sequence, n) for n in table.publish(sequence.page_keys, num_tokens)]
        table.drop(sequence.next_position)
        if table.has_unsent:
            self._state.running.dirty_tables.append(sequence)
