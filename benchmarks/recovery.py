"""What the death of one of two computes costs requests that it does not hit.

    python -m benchmarks.recovery [--rounds 3]

Two computes with a virtual device, on which a step takes 20 ms and each prompt token 50 us more,
serve 64 long streams: prompts of 1,000 tokens, answers of 800. Beside them come 15 short requests a
second. Then one compute is killed. Its 32 streams go on at the other one, which has to compute some
45,000 tokens for them: 2.2 s of its time. Requests that are sent meanwhile are not hit; the time to
their first token is compared with that of the seconds before. The longest gap in streams that were
hit says how long they waited.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, scratch_folder

SHAPE = ModelShape(vocab_size=4096, max_model_len=8192)
SETTINGS = {"compute.sim_step_base_s": 0.02, "compute.sim_step_per_token_s": 0.00005}
NUM_STREAMS = 64
NUM_WATCHED = 8  # of which gaps are taken
PROMPT_TOKENS, MAX_TOKENS = 1000, 800
PROBE_TOKENS, PROBES_PER_S = 250, 15.0
WARM_UP_S = 12.0
BEFORE_S = 10.0
KNOWN_AFTER_S = 0.3  # by then the router knows of the death
AFTER_S = 6.0
WITHIN_S = 120.0


@dataclass
class Load:
    """Streams without a pause and short requests at a steady rate, until `over` is set."""

    port: int
    over: threading.Event = field(default_factory=threading.Event)
    probes: list[tuple[float, float]] = field(default_factory=list)  # sent at, first token after
    gaps: list[tuple[float, float]] = field(default_factory=list)  # ended at, seconds
    failures: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(NUM_STREAMS):
            self._begin(partial(self._stream, number))
        self._begin(self._probe)

    def _begin(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run)
        self.threads.append(thread)
        thread.start()

    def _stream(self, number: int) -> None:
        dice, is_watched = random.Random(number), number < NUM_WATCHED
        time.sleep(WARM_UP_S * number / NUM_STREAMS)  # they do not begin all at once
        while not self.over.is_set():
            at_s = self._ask(dice, PROMPT_TOKENS, MAX_TOKENS, is_watched)
            for before_s, now_s in zip(at_s, at_s[1:], strict=False):
                if now_s - before_s > 0.1:
                    self.gaps.append((now_s, now_s - before_s))

    def _probe(self) -> None:
        dice, due_s = random.Random(-1), time.monotonic()
        while not self.over.wait(max(0.0, due_s - time.monotonic())):
            due_s += dice.expovariate(PROBES_PER_S)
            thread = threading.Thread(target=self._probe_once, args=(dice.random(),))
            thread.start()

    def _probe_once(self, seed: float) -> None:
        sent_s = time.monotonic()
        at_s = self._ask(random.Random(seed), PROBE_TOKENS, 1, True)
        if at_s:
            self.probes.append((sent_s, at_s[0] - sent_s))

    def _ask(
        self, dice: random.Random, num_prompt: int, max_tokens: int, stream: bool
    ) -> list[float]:
        """Ask for an answer; returns when each event with tokens came, if it streams."""
        body = {
            "prompt": [dice.randrange(100, SHAPE.vocab_size) for _ in range(num_prompt)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": stream,
            "logprobs": 0,  # an event for every token, also where its text is held back
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        headers = {"Content-Type": "application/json"}
        at_s = []
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            for line in response:
                if b'"error"' in line or response.status != 200:
                    self.failures.append(line.decode())
                elif line.startswith(b"data: {"):
                    at_s.append(time.monotonic())
        except (OSError, http.client.HTTPException) as error:
            self.failures.append(repr(error))
        finally:
            connection.close()
        return at_s


@dataclass(frozen=True)
class Round:
    """Milliseconds to the first token before and after the death, and the longest gap."""

    before_ms: list[float]
    after_ms: list[float]
    longest_gap_s: float

    @property
    def ratio(self) -> float:
        return percentile(self.after_ms, 0.99) / percentile(self.before_ms, 0.99)


def percentile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]


def kill_one(stack: Stack) -> tuple[float, float]:
    """Kill a compute after a while, and wait until it serves again.

    Returns when the while began and when it was killed.
    """
    began_s = time.monotonic()
    time.sleep(BEFORE_S)
    killed_s = time.monotonic()
    stack.kill("compute-0")
    time.sleep(KNOWN_AFTER_S + AFTER_S)
    stack.wait_until(lambda: len(stack.health()["instances"]) == 4, WITHIN_S, "complete again")
    time.sleep(WARM_UP_S)  # until the streams are on both again
    return began_s, killed_s


def round_of(load: Load, began_s: float, killed_s: float) -> Round:
    def between(from_s: float, to_s: float) -> list[float]:
        return [1000 * ttft_s for sent_s, ttft_s in load.probes if from_s <= sent_s < to_s]

    after_s = killed_s + KNOWN_AFTER_S
    gaps = [gap_s for at_s, gap_s in load.gaps if killed_s < at_s < killed_s + WARM_UP_S]
    return Round(between(began_s, killed_s), between(after_s, after_s + AFTER_S), max(gaps))


def measure(folder: Path, num_rounds: int) -> list[Round]:
    with Stack(folder, "--device", "sim", "--computes=2", settings=SETTINGS) as stack:
        load = Load(stack.port)
        load.start()
        time.sleep(2 * WARM_UP_S)
        times = [kill_one(stack) for _ in range(num_rounds)]
        load.over.set()
        for thread in load.threads:
            thread.join()
        if load.failures:
            raise SystemExit(f"{len(load.failures)} requests failed: {load.failures[0]}")
    return [round_of(load, *each) for each in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with scratch_folder() as folder:
        rounds = measure(save_folder(folder / "model", SHAPE, with_weights=False), options.rounds)
    report = Report(
        "recovery",
        "The death of one of two computes, for those it does not hit",
        "Target: the 99th percentile of the time to the first token at most doubles.",
    )
    report.table(
        (
            "round",
            "requests before / after",
            "p50 before, ms",
            "p99 before, ms",
            "p50 after, ms",
            "p99 after, ms",
            "ratio of p99",
            "longest gap of a stream that was hit, s",
        ),
        [
            (
                number,
                f"{len(each.before_ms)} / {len(each.after_ms)}",
                f"{percentile(each.before_ms, 0.5):.0f}",
                f"{percentile(each.before_ms, 0.99):.0f}",
                f"{percentile(each.after_ms, 0.5):.0f}",
                f"{percentile(each.after_ms, 0.99):.0f}",
                f"{each.ratio:.1f}",
                f"{each.longest_gap_s:.1f}",
            )
            for number, each in enumerate(rounds, 1)
        ],
    )
    report.write()


if __name__ == "__main__":
    main()
