"""The loop that turns the engine: one turn of asyncio a step, sleep only when there is no work."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

from services.compute.engine import Engine
from services.compute.scheduler.outputs import Output
from services.compute.scheduler.scheduler import Scheduler

TIMER_S = 0.0015  # libuv's timers count in milliseconds; what is nearer than this is not slept for
COLLECT_INTERVAL_S = 10.0  # of cyclic garbage, and only when there is nothing else to do
MASK_WAIT_S = 0.1  # between two looks for masks that nothing else depends on

Send = Callable[[list[Output]], object]


class StepLoop:
    """Plans, launches, collects and sends until closed."""

    def __init__(self, engine: Engine, scheduler: Scheduler, send: Send) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._send = send
        self._closing = False
        self._collected_s = 0.0
        self._slept_s = 0.0  # since a step's outputs were sent
        self.longest_block_s = 0.0  # by a slice of a step, by this thread's own clock
        self._sleeper: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def close(self) -> None:
        """Make `run` return after its turn."""
        self._closing = True
        self.wake()

    async def run(self) -> None:
        """Turn until closed; the results of launched steps are then still to be collected.

        A step that this thread computes is dropped: it may take longer than a stop may.
        """
        while not self._closing:
            await asyncio.sleep(0)  # messages in and out, timers
            self._deliver()
            if self._engine.waits_for_masks():
                await self._sample()
                continue
            engine = self._engine
            if not (engine.num_in_flight or engine.num_transfers or self._scheduler.has_work()):
                engine.rest()
                self._collect_garbage()
                await self._sleep(None)
                continue
            await self._sleep_until_near(self._engine.launch_delay_s())
            launched = self._engine.launch()
            if launched and self._engine.has_room:
                continue
            await self._compute()
            if self._engine.is_computing:
                continue
            if not self._engine.num_in_flight:
                # The policy waits for more requests, or for its window; or pages are on their way.
                delay_s = 0.0 if self._engine.num_transfers else self._engine.plan_delay_s()
                await self._sleep(max(TIMER_S, delay_s))
            elif self._engine.waits_for_masks():
                continue
            elif launched or not await self._sleep_until_near(self._engine.result_delay_s()):
                if launched:  # what comes while the device works is for the next plan
                    await self._sleep_until_near(self._engine.result_delay_s(), wakeable=False)
                self._engine.collect(force=True)
                self._deliver(of_step=True)

    async def _compute(self) -> None:
        """Compute a long step of the CPU while the loop turns, so that it never seems to hang, or
        look for what another stage makes of a step.

        Where a pipeline has room, only a slice: there may be something to plan by now.
        """
        while self._engine.is_computing:
            if self._closing:
                self._engine.drop_computing()
                return
            began_s = time.thread_time()
            self._engine.go_on()
            self.longest_block_s = max(self.longest_block_s, time.thread_time() - began_s)
            await asyncio.sleep(0)
            # an earlier step's, or ends of what was aborted or refused meanwhile
            engine = self._engine
            self._deliver(of_step=engine.is_computing and engine.collect_before())
            if self._engine.has_room:
                return

    async def _sample(self) -> None:
        wait_s = self._engine.sample()
        if wait_s > MASK_WAIT_S:
            await self._sleep(MASK_WAIT_S)  # what it waits for wakes it
        else:
            await self._sleep_until_near(wait_s)

    def _deliver(self, of_step: bool = False) -> None:
        outputs = self._scheduler.drain_outputs()
        began_s = self._engine.now_s()
        if outputs:
            self._send(outputs)
        if of_step:
            self._engine.sent(began_s, self._slept_s)
            self._slept_s = 0.0

    async def _sleep_until_near(self, delay_s: float, wakeable: bool = True) -> bool:
        """Sleep most of a delay; return whether `wake` cut it short."""
        if delay_s <= TIMER_S:
            return False
        return await self._sleep(delay_s - TIMER_S, wakeable)

    async def _sleep(self, delay_s: float | None, wakeable: bool = True) -> bool:
        """Sleep so long, or until woken; return whether `wake` ended it."""
        if self._closing:  # the wake that came with it is spent
            return True
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        woken = True

        def time_is_up() -> None:
            nonlocal woken
            if not sleeper.done():
                woken = False
                sleeper.set_result(None)

        timer = None if delay_s is None else loop.call_later(delay_s, time_is_up)
        self._sleeper = sleeper if wakeable else None
        began_s = self._engine.now_s()
        await sleeper
        self._slept_s += self._engine.now_s() - began_s
        self._sleeper = None
        if timer is not None:
            timer.cancel()
        return woken

    def _collect_garbage(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._collected_s > COLLECT_INTERVAL_S:
            self._collected_s = now_s
            gc.collect()
