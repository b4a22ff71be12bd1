"""The compute actor: requests and aborts in, a step's tokens out; between them the step loop."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Protocol

import structlog
from opentelemetry.trace import Span

from common.errors import FatalError, LinkError
from common.link.transport import Transport
from common.messages.address import Address, AttemptId
from common.messages.control import Abort, Load, ModelCard, RouterAlive, Signals, StepReport
from common.messages.generate import ComputeInbox, Generate
from common.messages.queries import Inspection, InspectionQuery, TimelineQuery
from common.messages.tokens import TokensGenerated
from common.registration import Registration, Worker, WorkerState
from common.telemetry import log, trace
from common.telemetry.span_ring import timeline_part
from services.compute.config import ComputeSettings
from services.compute.engine import Engine
from services.compute.grammar.manager import GrammarManager, spawn_mask_worker
from services.compute.grammar.protocol import GrammarSettings
from services.compute.grammar_queue import GrammarQueue
from services.compute.runner.protocol import Runner
from services.compute.scheduler.outputs import (
    Output,
    SequenceOutput,
    StepTokens,
    attempt_of,
)
from services.compute.scheduler.scheduler import Scheduler, SchedulerStats
from services.compute.step_loop import StepLoop
from services.compute.step_profile import DeviceShare, fitted
from services.compute.step_times import WINDOW
from services.compute.warm_up import warm_up

# A large model on a busy CPU may take seconds for a layer; then ten times the longest of those that
# were seen is no hang yet. Time in which this thread did not run is not counted as theirs.
BLOCKS = 10.0
MOST_BLOCK_S = 60.0
PROFILE_INTERVAL_S = 2.0


class Device(Protocol):
    """Loads what the actor runs; `start` calls it, so that a broken model is a clear error."""

    def card(self) -> ModelCard: ...

    def load(self) -> tuple[Runner, Scheduler, ModelCard, GrammarSettings]: ...


class ComputeActor(Worker):
    """Drives one device: messages to the scheduler, outputs to messages, its place in the fleet."""

    def __init__(
        self,
        settings: ComputeSettings,
        device: Device,
        registration: Registration,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(registration, clock)
        self._settings = settings
        self._device = device
        self._spans = GenerateSpans()
        self._step_id = 0
        self._num_waits = 0  # beats at which everything waited for masks
        self._trouble = ""
        self._profiled_at_s = -PROFILE_INTERVAL_S
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()

    async def start(self, transport: Transport) -> None:
        """Load the model, warm up and start the step loop; ModelError for a folder that is bad."""
        began_s = self._clock()
        self._transport = transport
        await self._registration.announce(transport, self._device.card())
        self._runner, self._scheduler, card, grammar_settings = self._device.load()
        spec = self._runner.spec()
        self._grammars = GrammarManager(
            grammar_settings, spawn_mask_worker, lambda: self._steps.wake(), self._clock
        )
        max_waiting = self._settings.max_waiting
        self._queue = GrammarQueue(
            self._scheduler, self._grammars, max_waiting, self._queue_moved, self._clock
        )
        self._engine = Engine(
            self._scheduler,
            self._runner,
            self._settings.in_flight_steps,
            self._clock,
            self._step_failed,
            self._grammars,
        )
        if self._settings.warmup:
            warm_up(self._engine, self._scheduler)
        loaded_s = self._clock()
        self._log.info(
            "model loaded",
            model=card.name,
            seconds=round(loaded_s - began_s, 2),
            kv_tokens=spec.num_pages // len(spec.kv_groups) * spec.kv_groups[0].page_tokens,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
        )
        stats = self._scheduler.stats()
        self._device_share = DeviceShare(stats.num_slots, stats.max_prefill_tokens)
        self._registration.start(transport, card)
        self._steps = StepLoop(self._engine, self._scheduler, self._send)
        self._task = asyncio.get_running_loop().create_task(self._steps.run())
        self._task.add_done_callback(self._loop_ended)
        if self._settings.grammar_at_startup:
            self._grammars.start()
        # From here on a collection would stop the device's loop for milliseconds: the loop
        # collects by hand when there is no work.
        gc.collect()
        gc.freeze()
        gc.disable()
        self._take_core()

    def receive(self, message: ComputeInbox, sender: Address) -> None:
        now_s = self._clock()
        self._registration.heard(sender, now_s)
        match message:
            case Generate():
                self._generate(message, now_s)
            case Abort(attempt=attempt):
                self._queue.abort(attempt, now_s)
            case RouterAlive():
                self._registration.answered(message, now_s)
                return
            case TimelineQuery():
                tracks = self._engine.records.tracks(now_s - message.seconds)
                self._transport.send(message.reply, timeline_part(message, self._clock, tracks))
                return
            case InspectionQuery():
                report = {"pages_freed": self._scheduler.flush_prefix_cache()}
                answer = Inspection(message.query, json.dumps(report).encode())
                self._transport.send(message.reply, answer)
                return
        self._steps.wake()

    def peer_lost(self, peer: Address) -> None:
        """End the attempts of a router or towards a detokenizer that takes no messages."""
        super().peer_lost(peer)
        self._queue.end_all(lambda request: request.detokenizer == peer, "aborted", self._clock())
        self._steps.wake()

    def tick(self, now_s: float) -> None:
        self._grammars.tick(now_s)
        super().tick(now_s)

    def state(self, now_s: float) -> WorkerState:
        stats = self._scheduler.stats()
        used = stats.pages_total - stats.pages_free
        self._judge(stats, now_s)
        # The mask worker is killed beyond its own bounds: waiting for it is no hang.
        queue_alone = self._queue and not self._engine.num_in_flight
        self._num_waits += bool(self._engine.waits_for_masks() or queue_alone)
        kv_usage = used / stats.pages_total if stats.pages_total else 0.0
        return WorkerState(
            load=Load(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting + stats.num_swapped + len(self._queue),
                capacity=self._runner.spec().max_num_seqs,
                kv_usage=kv_usage,
                steps=(steps := self._engine.report(now_s)),
                signals=self._signals(stats, steps, kv_usage, now_s),
            ),
            progress=self._engine.stats.num_steps + self._engine.num_slices + self._num_waits,
            stall_after_s=self.longest_block_s,
            open_counters=self._queue.open_attempts,
            trouble=self._trouble,
            experts=self._engine.experts.load(now_s),
        )

    @property
    def ready(self) -> bool:
        return super().ready and not self._trouble

    @property
    def idle(self) -> bool:
        return not self._scheduler.has_work() and not self._queue

    @property
    def longest_block_s(self) -> float:
        longest_s = min(BLOCKS * self._steps.longest_block_s, MOST_BLOCK_S)
        return max(self._runner.spec().stall_after_s, longest_s)

    async def stop(self) -> None:
        """Commit what is in flight, end the rest as moved, and release the device."""
        if self._task is None:  # it never served
            return
        self._task.remove_done_callback(self._loop_ended)
        self._steps.close()
        if not self._task.done():
            await self._task
        if self._task.exception() is None:
            while self._engine.collect(force=True):
                pass
            self._queue.end_all(lambda request: True, "moved", self._clock())
            self._send(self._scheduler.drain_outputs())
        # Else the routers must see a death, not an orderly move: it may be a request's doing.
        stats = asdict(self._engine.stats)
        seconds = {name: round(value, 4) for name, value in stats.items() if name[-2:] == "_s"}
        self._log.info("engine stopped", steps=stats["num_steps"], **seconds)
        self._grammars.close()
        self._runner.close()
        gc.enable()

    def _signals(
        self, stats: SchedulerStats, steps: StepReport, kv_usage: float, now_s: float
    ) -> Signals:
        device = self._device_share
        if now_s - self._profiled_at_s >= PROFILE_INTERVAL_S:
            self._profiled_at_s = now_s
            device.profile = fitted(self._engine.records.last(WINDOW))
        used = device.at(now_s, steps.num_prefill_tokens, steps.num_samples)
        num_tokens, since_s = self._scheduler.queue()
        return Signals(
            max(used, kv_usage, stats.num_running / stats.num_slots),
            0.0 if since_s is None else max(0.0, now_s - since_s),
            num_tokens,
            device.prefill_tokens_per_s,
            device.decode_tokens_per_s,
            self._registration.num_routers,
        )

    def _judge(self, stats: SchedulerStats, now_s: float) -> None:
        """Find out whether this replica is ill, and log it if that is news."""
        health = self._engine.health
        wrong = stats.nonfinite_requests_total
        health.served(stats.started_total, wrong, stats.num_running, now_s)
        before, self._trouble = self._trouble, health.trouble(now_s)
        if self._trouble and not before:
            self._log.error("unhealthy; others should get the requests", why=self._trouble)
        elif before and not self._trouble:
            self._log.info("healthy again")

    def _take_core(self) -> None:
        """Move this thread alone to the core that is kept for it.

        A thread inherits its cores: those of ZeroMQ, torch and CUDA have started by now and stay
        on all cores. Where the device is the CPU, its threads must not be separated.
        """
        core = self._settings.core
        if core < 0 or not self._runner.spec().overlaps or not hasattr(os, "sched_setaffinity"):
            return
        try:
            os.sched_setaffinity(0, {core})
        except OSError as error:
            self._log.warning("not pinned", core=core, error=str(error))
        else:
            self._log.info("pinned", core=core)

    def _generate(self, message: Generate, now_s: float) -> None:
        self._registration.expect(message.attempt.router, now_s)
        self._spans.begin(message, now_s)
        self._queue.add_request(message, now_s)

    def _queue_moved(self, outputs: Sequence[Output]) -> None:
        if outputs:
            self._send(outputs)
        self._steps.wake()

    def _send(self, outputs: Sequence[Output]) -> None:
        self._spans.note(outputs, self._clock())
        self._step_id += 1
        for detokenizer, message in pack_outputs(self._step_id, outputs):
            try:
                self._transport.send(detokenizer, message)
            except LinkError as error:
                log.for_attempts(row.attempt for row in message.rows()).error(
                    "tokens not sent", to=detokenizer.endpoint, error=str(error)
                )

    def drop_router(self, router: str, now_s: float) -> None:
        for counter in self._queue.open_attempts(router):
            self._queue.abort(AttemptId(router, counter), now_s)
        self._steps.wake()

    def _step_failed(self, error: Exception, traceparents: dict[AttemptId, str]) -> None:
        log.for_attempts(traceparents, traceparents.values()).error("step failed", exc_info=error)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """Take the process down with the loop: without it nothing is served here."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            fatal = FatalError("the step loop ended")
            fatal.__cause__ = error
            asyncio.get_running_loop().call_exception_handler(
                {"message": str(fatal), "exception": fatal}
            )


def pack_outputs(step_id: int, outputs: Iterable[Output]) -> list[tuple[Address, TokensGenerated]]:
    messages: dict[Address, TokensGenerated] = {}
    for item in outputs:
        message = messages.get(item.detokenizer)
        if message is None:
            message = messages[item.detokenizer] = TokensGenerated(step_id)
        match item:
            case StepTokens():
                message.extend(
                    item.router,
                    item.counter_S.data.cast("B"),
                    item.index_S.data.cast("B"),
                    item.token_S.data.cast("B"),
                )
            case SequenceOutput():
                _add(message, item)
    return list(messages.items())


def _add(message: TokensGenerated, output: SequenceOutput) -> None:
    message.add(
        output.attempt,
        output.first_index,
        output.token_ids,
        output.logprobs,
        output.header if output.opened else None,
        (output.prompt_tokens, output.cached_tokens, output.queued_s),
    )
    for scores in output.scored:
        message.score(scores)
    if output.drafted is not None and output.ending is None:  # whose usage has them
        message.draft(*output.drafted)
    if output.ending is not None:
        message.end(output.header, output.ending)


class GenerateSpans:
    """One `generate` span for each open choice of a request that is traced."""

    def __init__(self) -> None:
        self._open: dict[AttemptId, tuple[Span, float]] = {}

    def begin(self, request: Generate, now_s: float) -> None:
        if not request.traceparent:
            return
        parent = trace.context_from(request.traceparent)
        for choice in range(request.num_choices):
            span = trace.tracer().start_span("generate", parent)
            if not span.is_recording():
                return
            attempt = attempt_of(request, choice)
            span.set_attribute(trace.ATTEMPT, f"{attempt.router}:{attempt.counter}")
            span.set_attribute(trace.STAGE, "compute")
            self._open[attempt] = (span, now_s)

    def note(self, outputs: Iterable[Output], now_s: float) -> None:
        """Take what happened to sequences: a first token, an end."""
        if not self._open:
            return
        for output in outputs:
            if isinstance(output, SequenceOutput) and output.attempt in self._open:
                self._note(output, now_s)

    def _note(self, output: SequenceOutput, now_s: float) -> None:
        span, began_s = self._open[output.attempt]
        if output.opened:
            span.set_attribute(trace.TIME_TO_FIRST_TOKEN, now_s - began_s)
        ending = output.ending
        if ending is not None:
            del self._open[output.attempt]
            span.set_attribute(trace.RESPONSE_FINISH_REASONS, [ending.reason])
            span.set_attribute(trace.USAGE_INPUT_TOKENS, ending.usage.prompt_tokens)
            span.set_attribute(trace.USAGE_CACHED_TOKENS, ending.usage.cached_tokens)
            span.set_attribute(trace.USAGE_OUTPUT_TOKENS, ending.usage.completion_tokens)
            span.end()
