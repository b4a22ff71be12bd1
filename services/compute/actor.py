"""The compute actor: prompts and aborts in, a step's tokens out; between them the step loop."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import structlog

from common.errors import FatalError, LinkError
from common.link.transport import Transport
from common.messages.address import Address, AttemptId
from common.messages.control import Abort, Load, ModelCard, RouterAlive
from common.messages.failure import Ending, Failure, Usage
from common.messages.generate import ComputeInbox, Generate
from common.messages.queries import Inspection, InspectionQuery, TimelineQuery
from common.registration import Registration, Worker, WorkerState
from common.telemetry import log
from common.telemetry.span_ring import timeline_part
from services.compute.config import ComputeSettings
from services.compute.egress import step_messages
from services.compute.engine import Engine
from services.compute.grammar.manager import GrammarManager, spawn_mask_worker
from services.compute.grammar.messages import GrammarSettings
from services.compute.reception import Reception
from services.compute.runner.protocol import Runner, RunnerSpec
from services.compute.scheduler.protocol import News, Prompt, Request, Scheduler, SequenceEvent
from services.compute.spans import GenerateSpans
from services.compute.step_loop import StepLoop
from services.compute.warmup import warm_up

DRAINING = Failure(503, "draining", "This replica is shutting down.", retryable=True)


class Device(Protocol):
    """Loads what the actor runs: done in `start`, so that a broken model is a clear error."""

    def load(self) -> tuple[Runner, Scheduler, ModelCard]:
        """Load the model and make its runner, scheduler and card; ModelError if it cannot be."""
        ...

    def guide_settings(self, spec: RunnerSpec) -> GrammarSettings:
        """What the process is told that makes the masks of guided requests."""
        ...


class ComputeActor(Worker):
    """One device's actor: mail to scheduler, events to mail, and its place in the fleet."""

    def __init__(
        self,
        settings: ComputeSettings,
        device: Device,
        registration: Registration,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(registration)
        self._settings = settings
        self._device = device
        self._clock = clock
        self._spans = GenerateSpans()
        self._step_id = 0
        self._num_waits = 0  # beats at which everything waited for the guide
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()

    async def start(self, transport: Transport) -> None:
        """Load the model, warm up and start the step loop; ModelError for a folder that is bad."""
        began_s = self._clock()
        self._transport = transport
        self._runner, self._scheduler, card = self._device.load()
        spec = self._runner.spec()
        guide_settings = self._device.guide_settings(spec)
        self._guide = GrammarManager(guide_settings, spawn_mask_worker, self._wake, self._clock)
        self._reception = Reception(
            self._scheduler, self._guide, self._settings.max_waiting, self._tell, self._clock
        )
        self._engine = Engine(
            self._scheduler,
            self._runner,
            self._settings.in_flight_steps,
            self._clock,
            self._step_failed,
            self._guide,
        )
        if self._settings.warmup:
            warm_up(self._engine, self._scheduler)
        loaded_s = self._clock()
        kv_tokens = spec.num_pages * spec.kv_groups[0].page_tokens
        self._log.info(
            "model loaded",
            model=card.name,
            seconds=round(loaded_s - began_s, 2),
            kv_tokens=kv_tokens,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
        )
        self._registration.start(transport, card)
        self._steps = StepLoop(self._engine, self._scheduler, self._send)
        self._task = asyncio.get_running_loop().create_task(self._steps.run())
        self._task.add_done_callback(self._loop_ended)
        if self._settings.guide_at_startup:
            self._guide.start()
        # From here on a collection would stop the device's loop for milliseconds: the loop
        # collects by hand when there is no work.
        gc.collect()
        gc.freeze()
        gc.disable()
        self._take_core()

    def receive(self, message: ComputeInbox, sender: Address) -> None:
        """Handle one message; any mail of a router renews its lease."""
        now_s = self._clock()
        self._registration.heard(sender, now_s)
        match message:
            case Generate():
                self._generate(message, now_s)
            case Abort(attempt=attempt):
                self._reception.abort(attempt, now_s)
            case RouterAlive():
                self._registration.answered(message, now_s)
                return
            case TimelineQuery():
                self._show_timeline(message, now_s)
                return
            case InspectionQuery():
                found = {"pages_freed": self._scheduler.flush_prefix_cache()}
                self._transport.send(
                    message.reply, Inspection(message.query, json.dumps(found).encode())
                )
                return
        self._steps.wake()

    def peer_lost(self, peer: Address) -> None:
        """End the attempts of a router or towards a detokenizer that takes no mail."""
        self._registration.lost(peer)
        self.drop_router(peer.instance_id, self._clock())
        self._reception.end_all(
            lambda request: request.detokenizer == peer, "aborted", self._clock()
        )
        self._steps.wake()

    def tick(self, now_s: float) -> None:
        """Beat, and end the attempts of routers whose lease ran out."""
        self._guide.tick(now_s)
        self.beat(now_s)

    def state(self, now_s: float) -> WorkerState:
        stats = self._scheduler.stats()
        used = stats.pages_total - stats.pages_free
        # The guide has bounds of its own and is killed beyond them: waiting for it is no hang.
        held_alone = self._reception.num_held and not self._engine.num_in_flight
        self._num_waits += bool(self._engine.waits_for_masks() or held_alone)
        return WorkerState(
            load=Load(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting + stats.num_swapped + self._reception.num_held,
                capacity=self._runner.spec().max_num_seqs,
                kv_usage=used / stats.pages_total if stats.pages_total else 0.0,
                steps=self._engine.report(now_s),
            ),
            progress=self._engine.stats.num_steps + self._num_waits,
            stall_after_s=self._runner.spec().stall_after_s,
            open_counters=self._reception.open_attempts,
        )

    @property
    def idle(self) -> bool:
        return not self._scheduler.has_work() and not self._reception.num_held

    @property
    def num_open(self) -> int:
        """Sequences with state here."""
        stats = self._scheduler.stats()
        in_scheduler = stats.num_running + stats.num_waiting + stats.num_swapped
        return in_scheduler + self._reception.num_held

    async def stop(self) -> None:
        """Commit what is in flight, end the rest as moved, and release the device."""
        if self._task is None:  # it never came to serving
            return
        self._task.remove_done_callback(self._loop_ended)
        self._steps.close()
        if not self._task.done():
            await self._task
        if self._task.exception() is None:
            while self._engine.collect(force=True):
                pass
            self._reception.end_all(lambda request: True, "moved", self._clock())
            self._send(self._scheduler.take_news())
        # Else the routers must see a death, not an orderly move: it may be a request's doing.
        stats = self._engine.stats
        self._log.info(
            "engine stopped",
            steps=stats.num_steps,
            plan_s=round(stats.plan_s, 4),
            launch_s=round(stats.launch_s, 4),
            wait_s=round(stats.wait_s, 4),
            commit_s=round(stats.commit_s, 4),
            device_busy_s=round(stats.device_busy_s, 4),
            device_idle_s=round(stats.device_idle_s, 4),
        )
        self._guide.close()
        self._runner.close()
        gc.enable()

    def _take_core(self) -> None:
        """Move this thread, and no other of the process, to the core that is kept for it.

        It comes last: a thread starts where the one is that makes it, so what ZeroMQ, torch and
        CUDA have made by now stays on the cores of all. Where the device is the CPU, its threads
        must not be parted.
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
        request = request_of(message)
        if self._registration.draining:
            self._send([_refused(request, choice) for choice in range(request.num_choices)])
            return
        self._registration.expect(message.attempt.router, now_s)
        self._spans.begin(request, now_s)
        self._reception.add(request, now_s)

    def _wake(self) -> None:
        self._steps.wake()

    def _tell(self, news: Sequence[News]) -> None:
        """Send what the reception has to say, and let the loop look at what it has let in."""
        if news:
            self._send(news)
        self._steps.wake()

    def _send(self, news: Sequence[News]) -> None:
        self._spans.note(news, self._clock())
        self._step_id += 1
        for detokenizer, message in step_messages(self._step_id, news):
            try:
                self._transport.send(detokenizer, message)
            except LinkError as error:
                log.for_attempts(row.attempt for row in message.rows()).error(
                    "tokens not sent", to=detokenizer.endpoint, error=str(error)
                )

    def _show_timeline(self, query: TimelineQuery, now_s: float) -> None:
        tracks = self._engine.records.tracks(now_s - query.seconds)
        self._transport.send(query.reply, timeline_part(query, self._clock, tracks))

    def drop_router(self, router: str, now_s: float) -> None:
        for counter in self._reception.open_attempts(router):
            self._reception.abort(AttemptId(router, counter), now_s)
        self._steps.wake()

    def _step_failed(self, error: Exception, traceparents: dict[AttemptId, str]) -> None:
        log.for_attempts(traceparents, traceparents.values()).error("step failed", exc_info=error)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """Take the process down with the loop: without it nothing is served here."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        fatal = FatalError("the step loop ended")
        fatal.__cause__ = error
        asyncio.get_running_loop().call_exception_handler(
            {"message": "the step loop ended", "exception": fatal}
        )


def request_of(message: Generate) -> Request:
    """What the scheduler takes, in the bytes that came."""
    return Request(
        attempt=message.attempt,
        detokenizer=message.detokenizer,
        prompt=Prompt(message.prompt_ids),
        output_ids=np.frombuffer(message.output_ids, dtype=np.int32),
        sampling=message.sampling,
        header=message.header,
        num_choices=message.num_choices,
        first_choice=message.first_choice,
        priority=message.priority,
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        pooling=message.pooling,
    )


def _refused(request: Request, choice: int) -> SequenceEvent:
    usage = Usage(len(request.prompt), 0, len(request.output_ids))
    return SequenceEvent(
        attempt=AttemptId(request.attempt.router, request.attempt.counter + choice),
        detokenizer=request.detokenizer,
        header=request.header,
        first_index=len(request.output_ids),
        token_ids=(),
        opened=True,
        ending=Ending("refused", usage, failure=DRAINING),
    )
