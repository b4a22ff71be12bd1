"""Clients of the soak: they read whole answers or leave in the middle, as their turn says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import aiohttp

from benchmarks.soak_requests import Answer, Mix, Turn, problems_of

REQUEST_TIMEOUT_S = 60.0
KEPT_PROBLEMS = 20


@dataclass(slots=True)
class Tally:
    """What the soak's clients have seen so far."""

    num_ended: int = 0
    num_stayed: int = 0
    num_left: int = 0  # in the middle; a client may find its answer there already
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    problems: list[str] = field(default_factory=list)  # the first few
    kept: dict[int, Answer] = field(default_factory=dict)  # answers to be asked for again

    def note(self, turn: Turn, answer: Answer | None, keep: bool) -> None:
        """Count one turn; None is a client that left."""
        self.num_ended += 1
        if answer is None:
            self.num_left += 1
            return
        self.num_stayed += 1
        problems = problems_of(turn, answer)
        if problems:
            self.num_failed += 1
            if len(self.problems) < KEPT_PROBLEMS:
                self.problems.append(f"request {turn.number}: {'; '.join(problems)}")
            return
        usage = answer.usage
        self.prompt_tokens += usage["prompt_tokens"]
        self.output_tokens += usage["completion_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        if keep and turn.stays:
            self.kept[turn.number] = answer


async def ask(session: aiohttp.ClientSession, url: str, turn: Turn) -> Answer | None:
    """Ask and read; None if the client left before the end."""
    answer = Answer()
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S if turn.stays else turn.leaves_after_s):
            async with session.post(url, json=turn.body) as response:
                if response.status != 200:
                    answer.error = f"status {response.status}: {(await response.text())[:300]}"
                elif not turn.body.get("stream"):
                    answer.take(await response.json())
                elif not await _read_stream(response, answer, turn.leaves_after_events):
                    response.close()
                    return None
    except TimeoutError:
        if turn.leaves_after_s is None:
            answer.error = f"no end within {REQUEST_TIMEOUT_S:g} s"
        else:
            return None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read_stream(
    response: aiohttp.ClientResponse, answer: Answer, leave_after: int | None
) -> bool:
    """Read events to the end; False if the client leaves before."""
    num_events = 0
    is_done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            is_done = True
            continue
        answer.take(json.loads(line[6:]))
        num_events += 1
        if leave_after is not None and num_events >= leave_after:
            return False
    if not is_done and not answer.error:
        answer.error = "the stream ended without [DONE]"
    return True


async def soak(
    url: str,
    mix: Mix,
    numbers: Iterable[int],
    num_streams: int,
    keeps: Callable[[int], bool],
    on_ended: Callable[[Tally], None],
) -> Tally:
    """Ask all of the numbers, so many at once; `on_ended` is called after each."""
    tally = Tally()
    left: Iterator[int] = iter(numbers)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def stream() -> None:
            for number in left:
                turn = mix.turn(number)
                tally.note(turn, await ask(session, url, turn), keeps(number))
                on_ended(tally)

        await asyncio.gather(*(stream() for _ in range(num_streams)))
    return tally


async def ask_alone(url: str, mix: Mix, tally: Tally) -> list[int]:
    """Ask for every kept answer again, one after the other; returns those that differ."""
    differing = []
    async with aiohttp.ClientSession() as session:
        for number, before in tally.kept.items():
            again = await ask(session, url, mix.turn(number))
            if again is None or (again.texts, again.ends) != (before.texts, before.ends):
                differing.append(number)
    return differing
