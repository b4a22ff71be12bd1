"""The engine: plans a step ahead of the device, collects the step before and commits it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from math import isnan
from typing import Any

from common.errors import FatalError
from common.messages.address import AttemptId
from common.messages.control import StepReport
from common.messages.failure import Failure
from services.compute.expert_counters import ExpertReport
from services.compute.grammar.protocol import MaskSource
from services.compute.masking import MASK_PATIENCE_S, Masking
from services.compute.replica_health import ReplicaHealth, work_of
from services.compute.runner.protocol import Runner, SlotErrors
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.transfers import Transfer
from services.compute.step import StepPlan, StepResult
from services.compute.step_times import StepRecords, StepTimer, step_kind

BROKEN_STEP = Failure(500, "engine_step_failed", "The model's step failed; see the server's log.")

BROKEN_SETTINGS = Failure(
    500, "engine_settings_failed", "The sampling settings were not taken; see the server's log."
)


@dataclass(slots=True)
class EngineStats:
    """What the loop did; `device_idle_s` counts gaps between steps while there was work."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_samples: int = 0
    plan_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    commit_s: float = 0.0
    device_busy_s: float = 0.0
    device_idle_s: float = 0.0


@dataclass(slots=True)
class _Launched:
    """A step that is on the device, or `computing` here, a slice at a time, or waiting for what
    another stage makes of it.

    With `masked` its sampling is still to be launched.
    """

    plan: StepPlan
    ticket: Any
    kind: tuple[int, int]
    launched_s: float
    record: int  # its number in the records
    masked: bool = False
    computing: bool = False
    sampled_s: float | None = None  # when it was launched
    skipped: frozenset[int] = frozenset()  # samples that draw nothing


class Engine:
    """One device's loop body, split where the actor has to turn its own loop.

    `in_flight_steps` is how many launched steps may be without a result when the next is planned;
    a runner that does not overlap gets 0, since waiting there would only delay its tokens, or as
    many as it has stages beside this process's. `on_step_error` gets the error of a broken step and
    the attempts that it ended, with the traceparent of each. `mask_source` makes the masks of
    structured samples. The forward pass of their step is launched as any other; its sampling
    (`sample`) when all earlier steps have been collected and the masks are there.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        in_flight_steps: int,
        clock: Callable[[], float],
        on_step_error: Callable[[Exception, dict[AttemptId, str]], None],
        mask_source: MaskSource | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._depth = runner.spec().steps_ahead(in_flight_steps)
        self._clock = clock
        self._on_step_error = on_step_error
        self._mask_source = mask_source
        self._masking = None if mask_source is None else Masking(scheduler, mask_source)
        self._in_flight: deque[_Launched] = deque()
        self._transfers: list[tuple[Transfer, Any]] = []  # under way, with their tickets
        self.experts = ExpertReport(runner.expert_counters())
        self.num_slices = 0  # of steps that took several
        self.forget()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_transfers(self) -> int:
        """Transfers under way: while there are any, `launch` has to look for their end."""
        return len(self._transfers)

    @property
    def has_room(self) -> bool:
        in_flight = self._in_flight
        return len(in_flight) <= self._depth and not (in_flight and in_flight[-1].masked)

    def waits_for_masks(self) -> bool:
        """Whether the sampling of the one step in flight is what comes next."""
        return len(self._in_flight) == 1 and self._in_flight[0].masked and not self.is_computing

    def launch_delay_s(self) -> float:
        """How long planning can still wait for new requests without the device running dry.

        Where nothing overlaps it is dry, as the first of several stages is; but it waits for masks
        that may force tokens of its step.
        """
        if self._runner.spec().pauses:
            masking = None if self._in_flight else self._masking
            return MASK_PATIENCE_S if masking is not None and masking.may_force() else 0.0
        if not (self._in_flight and self.has_room):
            return 0.0
        newest = self._in_flight[-1]
        return self._timer.launch_at_s(newest.kind, newest.launched_s) - self._clock()

    def result_delay_s(self) -> float:
        if not self._in_flight:
            return 0.0
        oldest = self._in_flight[0]
        return self._timer.end_s(oldest.kind, oldest.launched_s) - self._clock()

    def plan_delay_s(self) -> float:
        """How long until there may be something to plan though nothing happens meanwhile."""
        wake_at_s = self._scheduler.wake_at_s()
        return 0.0 if wake_at_s is None else max(0.0, wake_at_s - self._clock())

    def launch(self) -> bool:
        """Plan the next step and put it on the device; False when there is none to plan yet."""
        if not self.has_room:
            return False
        began_s = self._clock()
        plan = self._plan(began_s)
        planned_s = self._clock()
        if plan is None:
            return False
        try:
            if self._mask_source is not None and plan.slots:
                self._mask_source.place(plan.slots)
            ticket = self._forward(plan)
            computing = self._runner.spec().pauses
            if computing and not self._depth:  # in a pipeline it waits for its turn
                computing = not self._runner.go_on(ticket)
            if not (plan.structured or computing):
                ticket = self._runner.sample(ticket)
        except FatalError:
            raise
        except Exception as error:  # the step's fault: its requests fail, the others go on
            self._fail(plan, error)
            return True
        launched_s = self._clock()
        kind = step_kind(plan.num_decode_rows, plan.num_tokens - plan.num_decode_rows)
        record = self.records.launched(plan, began_s, planned_s, launched_s)
        step = _Launched(plan, ticket, kind, launched_s, record, bool(plan.structured), computing)
        self._in_flight.append(step)
        if self._runner.spec().overlaps:
            self._timer.host_took(launched_s - began_s)
        self.stats.plan_s += planned_s - began_s
        self.stats.launch_s += launched_s - planned_s
        return True

    @property
    def is_computing(self) -> bool:
        """Whether `go_on` has a step to compute, in this thread."""
        return self._computing() is not None

    def _computing(self) -> _Launched | None:
        """The oldest step that is; where nothing overlaps, the results of those before it come
        first."""
        steps = self._in_flight if self._runner.spec().overlaps else islice(self._in_flight, 1)
        return next((step for step in steps if step.computing), None)

    def go_on(self) -> None:
        """Compute a slice of the oldest step that is to be computed here."""
        step = self._computing()
        if step is None:
            return
        try:
            step.computing = not self._runner.go_on(step.ticket)
            if not (step.computing or step.masked):
                step.ticket = self._runner.sample(step.ticket)
        except FatalError:
            raise
        except Exception as error:
            self._in_flight.remove(step)
            self._fail(step.plan, error)
        step.launched_s = self._clock()  # it need not be waited for
        self.num_slices += 1

    def collect_before(self) -> bool:
        """Take the result of a step before those to be computed; False if there is none yet."""
        oldest = self._in_flight[0]
        return not (oldest.computing or oldest.masked) and self.collect(force=False)

    def drop_computing(self) -> None:
        """Forget the steps that this thread has to compute; their requests are to end."""
        while self._in_flight and self._in_flight[-1].computing:
            self._in_flight.pop()

    def _plan(self, now_s: float) -> StepPlan | None:
        """Plan a step between the transfers that have ended and those that have to start."""
        self._end_transfers()
        if self._mask_source is not None:
            self._scheduler.foresee(self._mask_source.forced())
        plan = self._scheduler.plan(now_s)
        if self._start_transfers() and plan is None:
            # They may have ended or failed already, as where nothing overlaps.
            self._end_transfers()
            plan = self._scheduler.plan(now_s)
            self._start_transfers()
        return plan

    def _start_transfers(self) -> bool:
        """Start what the scheduler wants copied; False if that is nothing."""
        transfers = self._scheduler.take_transfers()
        for transfer in transfers:
            try:
                ticket = self._runner.transfer(transfer.direction, transfer.pages)
            except FatalError:
                raise
            except Exception as error:  # its sequence computes again what should have been copied
                self._scheduler.transfer_failed(transfer)
                self._on_step_error(error, {})
            else:
                self._transfers.append((transfer, ticket))
        return bool(transfers)

    def _end_transfers(self) -> None:
        under_way = []
        for transfer, ticket in self._transfers:
            if self._runner.transferred(ticket):
                self._scheduler.transferred(transfer)
            else:
                under_way.append((transfer, ticket))
        self._transfers = under_way

    def _forward(self, plan: StepPlan) -> Any:
        """Launch the forward pass; sequences whose settings the runner cannot take fail alone."""
        try:
            return self._runner.forward(plan)
        except SlotErrors as errors:
            ended = self._scheduler.fail_slots(errors.by_slot, BROKEN_SETTINGS)
            self._on_step_error(errors, ended)
            return self._runner.forward(plan.without_settings(errors.by_slot))

    def sample(self, force: bool = False) -> float:
        """Launch the sampling that waits for masks, or say in how long to try again at the latest.

        Samples without a mask are skipped; with `force` nothing is waited for.
        """
        step, masking = self._in_flight[0], self._masking
        began_s = self._clock()
        try:
            if masking is None:
                raise RuntimeError(
                    f"step {step.plan.step_id} is structured, and there is no source of masks"
                )
            due_s, step_s = self._sampling_due(step, masking)
            masks = masking.masks(step.plan, due_s - began_s, step_s, force)
            if isinstance(masks, float):
                return masks
            step.skipped = frozenset(masks.skipped)
            step.sampled_s = self._clock()
            step.ticket = self._runner.sample(step.ticket, masks)
        except FatalError:
            raise
        except Exception as error:
            self._in_flight.popleft()
            self._fail(step.plan, error)
            return 0.0
        step.masked = False
        sampling_s = self._clock() - began_s
        self._timer.sampling_took(sampling_s)
        self.stats.launch_s += sampling_s
        return 0.0

    def _sampling_due(self, step: _Launched, masking: Masking) -> tuple[float, float]:
        """When the device would run dry without the step's sampling, and how long it takes for the
        step, as far as masks are to be waited for beyond that."""
        if self._runner.spec().overlaps:
            due_s = self._timer.sample_at_s(step.kind, step.launched_s)
            return due_s, self._timer.step_s(step.kind)
        # It is dry already, but computing a row again costs it more: it waits a little, though not
        # for a sequence whose last mask was late.
        patience_s = MASK_PATIENCE_S if masking.may_come_soon(step.plan) else 0.0
        return step.launched_s + patience_s, 0.0

    def collect(self, force: bool) -> bool:
        """Take the oldest step's result, waiting for it only if `force`; False if there is none."""
        while force and self._in_flight and self._in_flight[0].computing:
            self.go_on()
        if not self._in_flight or self._in_flight[0].computing:
            return False
        oldest = self._in_flight[0]
        if oldest.masked and (self.sample(force) > 0.0 or not self._in_flight):
            return force
        if not force and not self._runner.ready(oldest.ticket):
            return False
        self._in_flight.popleft()
        began_s = self._clock()
        try:
            result = self._runner.result(oldest.ticket)
        except FatalError:
            raise
        except Exception as error:
            self._fail(oldest.plan, error)
            return True
        waited_s = self._clock()
        if self._mask_source is not None and oldest.plan.structured:
            self._mask_source.advance(oldest.plan, result, oldest.skipped)
        self._scheduler.commit(oldest.plan, result, waited_s)
        committed_s = self._clock()
        self.records.taken(
            oldest.record, began_s, waited_s, committed_s, *result.num_drafts(oldest.plan)
        )
        stats, plan = self.stats, oldest.plan
        stats.num_steps += 1
        stats.num_prefill_tokens += plan.num_tokens - plan.num_decode_rows
        stats.num_samples += len(plan.sample_row)
        stats.wait_s += waited_s - began_s
        stats.commit_s += committed_s - waited_s
        self._learn(oldest, result, waited_s)
        return True

    def now_s(self) -> float:
        return self._clock()

    def sent(self, began_s: float, slept_s: float) -> None:
        """Note when the last step's outputs were sent, and how long the loop slept before."""
        self.records.sent(began_s, self._clock(), slept_s)

    def report(self, now_s: float) -> StepReport:
        """Say what the last steps took; cheap enough for every heartbeat, not for every step."""
        counts = self._scheduler.stats()
        return StepReport(
            num_steps=self.stats.num_steps,
            num_prefill_tokens=self.stats.num_prefill_tokens,
            num_samples=self.stats.num_samples,
            times=self.records.times(now_s),
            device_idle_ratio=self.records.device_idle_ratio(now_s),
            num_preemptions=counts.preemptions_total,
            num_draft_tokens=counts.drafts_total,
            num_accepted_tokens=counts.accepted_drafts_total,
            drafts=counts.drafts,
        )

    def forget(self) -> None:
        """Begin the statistics, or begin them anew after the warm-up."""
        self.stats = EngineStats()
        self.records = StepRecords()
        self.health = ReplicaHealth()
        self.experts.forget()
        self._timer = StepTimer()
        self._device_end_s = 0.0

    def rest(self) -> None:
        """Note that there is no work: the gap until the next step is not idle time."""
        self._device_end_s = 0.0
        self.records.rested()

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self._on_step_error(error, self._scheduler.fail_step(plan, BROKEN_STEP, self._clock()))

    def _learn(self, step: _Launched, result: StepResult, seen_s: float) -> None:
        start_s, end_s = result.device_start_s, result.device_end_s
        if isnan(end_s):
            self._timer.ended(step.kind, step.launched_s, seen_s, step.sampled_s)
            return
        self._timer.ended(step.kind, step.launched_s, end_s, step.sampled_s)
        self.records.on_device(step.record, start_s, end_s)
        if step.sampled_s is None:  # else it may have waited for masks
            took_s = end_s - start_s if isnan(result.computed_s) else result.computed_s
            self.health.step_took(work_of(step.plan), took_s, seen_s)
        self.stats.device_busy_s += end_s - start_s
        if self._device_end_s > 0.0:
            waited_s = max(0.0, start_s - self._device_end_s)
            self.stats.device_idle_s += waited_s
            self._scheduler.device_waited(waited_s)
        self._device_end_s = end_s
