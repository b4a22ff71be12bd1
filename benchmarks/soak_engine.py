"""The soak without processes: scheduler, engine and runner alone, as fast as they go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak_requests import Mix, Turn
from common.config import ModelSettings
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import Generate
from services.compute.config import ComputeSettings
from services.compute.device import ModelDevice
from services.compute.engine import Engine
from services.compute.scheduler.outputs import SequenceOutput, sequence_outputs
from services.compute.scheduler.scheduler import SchedulerStats
from services.compute.warm_up import warm_up
from services.router.openai.completions import parse_completion
from services.router.request_warnings import Warnings

ROUTER = "soak"
CHOICES = 8  # counters that one request may take
DETOKENIZER = Address("inproc://detokenizer", "soak")
ENDED = ("stop", "length")


@dataclass(slots=True)
class _Open:
    """One attempt that has not ended."""

    turn: Turn
    tokens: list[int] = field(default_factory=list)
    leaves: bool = False


@dataclass(slots=True)
class EngineTally:
    """What came out of the engine."""

    num_sequences: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    output_tokens: int = 0
    num_steps: int = 0
    problems: list[str] = field(default_factory=list)
    kept: dict[int, list[int]] = field(default_factory=dict)  # tokens by attempt counter


class EngineSoak:
    """Drives an engine as the step loop does, with requests and aborts at any time."""

    def __init__(self, folder: Path, mix: Mix, settings: ComputeSettings) -> None:
        self._mix = mix
        self._runner, self._scheduler, *_ = ModelDevice(
            ModelSettings(path=str(folder)), settings
        ).load()
        self._engine = Engine(
            self._scheduler,
            self._runner,
            settings.in_flight_steps,
            time.monotonic,
            lambda error, _: self._problem(f"a step failed: {error!r}"),
        )
        warm_up(self._engine, self._scheduler)
        self._open: dict[int, _Open] = {}
        self.tally = EngineTally()

    def run(
        self,
        numbers: Iterable[int],
        num_streams: int,
        keeps: Callable[[int], bool],
        on_step: Callable[[EngineTally], bool] = lambda tally: True,
    ) -> None:
        """Run all of the numbers to their end, unless `on_step` says that it is enough."""
        left = iter(numbers)
        more = True
        while more or self._open or self._engine.num_in_flight:
            while more and len(self._open) < num_streams:
                number = next(left, None)
                if number is None:
                    more = False
                    break
                self._add(self._mix.turn(number))
            self._turn(keeps)
            more = more and on_step(self.tally)

    def ask_alone(self) -> list[int]:
        """Run every kept sequence's request by itself; returns those whose tokens differ."""
        before, self.tally.kept = self.tally.kept, {}
        differing = []
        for counter, tokens in before.items():
            self.run([counter // CHOICES], 1, lambda number: True)
            if self.tally.kept.get(counter) != tokens:
                differing.append(counter // CHOICES)
        return sorted(set(differing))

    def stats(self) -> SchedulerStats:
        """Return the scheduler's counts."""
        return self._scheduler.stats()

    def leftovers(self) -> list[str]:
        """Name what an idle engine would not have."""
        stats = self.stats()
        found = [
            f"{count} sequences are {what}"
            for what, count in (
                ("running", stats.num_running),
                ("waiting", stats.num_waiting),
                ("swapped", stats.num_swapped),
                ("open", len(self._scheduler.open_attempts(ROUTER))),
            )
            if count
        ]
        if stats.pages_free != stats.pages_total:
            found.append(f"{stats.pages_free} of {stats.pages_total} pages are free")
        return found

    def close(self) -> None:
        """Release the device."""
        self._runner.close()

    def _add(self, turn: Turn) -> None:
        request = parse_completion(turn.body, Warnings()).generate
        prompt = turn.body["prompt"]
        ids = prompt if isinstance(prompt, list) else list(prompt.encode())
        counter = turn.number * CHOICES
        for choice in range(request.num_choices):
            self._open[counter + choice] = _Open(turn)
        self.tally.num_sequences += request.num_choices
        message = Generate(
            attempt=AttemptId(ROUTER, counter),
            detokenizer=DETOKENIZER,
            prompt_ids=int32s(ids).tobytes(),
            output_ids=int32s(),
            sampling=request.sampling,
            header=b"",
            admitted_at_s=0.0,
            num_choices=request.num_choices,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        self._scheduler.add_request(message, time.monotonic())
        if turn.leaves_after_s == 0.0:
            self._abort(counter, request.num_choices)

    def _abort(self, counter: int, num_choices: int) -> None:
        for each in range(counter, counter + num_choices):
            if each in self._open:
                self._open[each].leaves = True
                self._scheduler.abort(AttemptId(ROUTER, each), time.monotonic())

    def _turn(self, keeps: Callable[[int], bool]) -> None:
        launched = self._engine.launch()
        if not (launched and self._engine.has_room) and self._engine.collect(force=True):
            self.tally.num_steps += 1
        for event in sequence_outputs(self._scheduler.drain_outputs()):
            self._hear(event, keeps)

    def _hear(self, event: SequenceOutput, keeps: Callable[[int], bool]) -> None:
        counter = event.attempt.counter
        attempt = self._open.get(counter)
        if attempt is None:
            self._problem(f"sequence {counter} goes on after its end")
            return
        if event.first_index != len(attempt.tokens):
            self._problem(f"sequence {counter} has a gap at {len(attempt.tokens)}")
        attempt.tokens.extend(event.token_ids)
        turn = attempt.turn
        if event.ending is not None:
            del self._open[counter]
            self._ended(counter, attempt, event)
            if turn.stays and event.ending.reason in ENDED and keeps(turn.number):
                self.tally.kept[counter] = attempt.tokens
        elif _has_left(turn, len(attempt.tokens)) and not attempt.leaves:
            self._abort(turn.number * CHOICES, turn.num_choices)

    def _ended(self, counter: int, attempt: _Open, event: SequenceOutput) -> None:
        assert event.ending is not None
        tally, reason = self.tally, event.ending.reason
        tally.output_tokens += len(attempt.tokens)
        if reason == "aborted" and attempt.leaves:
            tally.num_aborted += 1
        elif reason not in ENDED:
            tally.num_failed += 1
            self._problem(f"sequence {counter} ended as {reason}: {event.ending.failure}")
        elif attempt.turn.is_exact and len(attempt.tokens) != attempt.turn.body["max_tokens"]:
            tally.num_failed += 1
            self._problem(f"sequence {counter} has {len(attempt.tokens)} tokens, ended {reason}")

    def _problem(self, text: str) -> None:
        if len(self.tally.problems) < 20:
            self.tally.problems.append(text)


def _has_left(turn: Turn, num_tokens: int) -> bool:
    """Whether its client is gone by now; a wait is taken as so many tokens here."""
    if turn.leaves_after_events is not None:
        return num_tokens >= turn.leaves_after_events
    return turn.leaves_after_s is not None and num_tokens >= 1 + int(200 * turn.leaves_after_s)
