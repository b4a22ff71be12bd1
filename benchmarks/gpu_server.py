"""A server with one of the models, its checks, and the runs of workloads against it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_figures import GpuFigures, gpu_figures_of
from benchmarks.gpu_timeline import cut, device_times
from benchmarks.stack import Stack, StackError, cpu_s, rss_mib
from common.messages.queries import Timeline
from services.bench.client import Clients, LoadResult, OfferedLoad, ServerAddress
from services.bench.workloads import BenchRequest, completion
from services.timeline import TimelineError, chrome_trace, fetch

MAX_MODEL_LEN = 4096
READY_WITHIN_S = 300.0
CLEAN_WITHIN_S = 10.0
STOPPED_WITHIN_S = 60.0
REQUEST_TIMEOUT_S = 120.0
PATH = "/v1/completions"
CHECKED_PROMPT, CHECKED_TOKENS = 100, 64
TRACED_AT, TRACED_S = 0.4, 0.25  # where in a run, as a share of it, and for how long
KV_METRIC = "slipstream_compute_kv_cache_usage_ratio"


@dataclass(frozen=True, slots=True)
class Setup:
    """How models are served and asked."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    num_routers: int = 1
    num_detokenizers: int = 1
    num_clients: int = 4
    settings: Mapping[str, object] | None = None

    def options(self) -> tuple[str, ...]:
        """Return the options of `slipstream serve`."""
        given = ["--device", self.device, "--max-model-len", str(MAX_MODEL_LEN)]
        if self.device != "sim":
            given += ["--load-format", "dummy", "--dtype", self.dtype]
        given += ["--routers", str(self.num_routers)]
        return (*given, "--detokenizers", str(self.num_detokenizers))


class Server:
    """One `slipstream serve` of one model folder; close it, or use it in a `with`."""

    def __init__(
        self, setup: Setup, folder: Path, within_s: float = READY_WITHIN_S, **settings: object
    ) -> None:
        self._setup = setup
        self.model = folder.name
        began_s = time.monotonic()
        self.stack = Stack(
            folder,
            *setup.options(),
            settings={**(setup.settings or {}), **settings},
        )
        self.command = self.stack.command.replace(str(folder), folder.name)
        self.stack.wait_ready(min(within_s, READY_WITHIN_S))
        self.start_s = time.monotonic() - began_s

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for an answer in one piece; StackError if it is refused."""
        request = urllib.request.Request(
            self.stack.url + PATH,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            raise StackError(f"status {error.code}: {error.read()[:400]!r}") from None

    def measure(
        self, asks: Sequence[BenchRequest], concurrency: int, within_s: float
    ) -> GpuFigures:
        """Run a workload; ClientError when it takes longer than it may."""
        endpoint = ServerAddress("127.0.0.1", self.stack.port)
        requests = tuple(endpoint.post(PATH, completion(self.model, ask)) for ask in asks)
        processes = self.stack.pids()
        clients = Clients(endpoint, OfferedLoad(requests, concurrency), self._setup.num_clients)
        before = {name: cpu_s(pid) for name, pid in processes.items()}
        outcome = clients.run(within_s)
        used = {name: cpu_s(pid) - before[name] for name, pid in processes.items()}
        self._timeline, self._outcome = self._fetch(outcome), outcome
        times = [(reply.sent_s, reply.end_s) for reply in outcome.replies]
        return gpu_figures_of(asks, outcome, used, device_times(self._timeline, times))

    def save_trace(self, path: Path) -> None:
        """Write a moment of the last run, from its middle, as a trace for Perfetto."""
        begin_s = min(reply.sent_s for reply in self._outcome.replies)
        middle_s = begin_s + TRACED_AT * self._outcome.wall_s
        moment = cut(self._timeline, middle_s, middle_s + TRACED_S)
        path.write_text(json.dumps(chrome_trace(moment)))

    def _fetch(self, outcome: LoadResult) -> Timeline:
        try:
            return fetch(self.stack.url, min(600.0, outcome.wall_s + 5.0))
        except TimelineError as error:
            print(f"no timeline: {error}", flush=True)
            return Timeline(())

    def memory_mib(self) -> dict[str, float]:
        """Return what each process has in use."""
        return {name: rss_mib(pid) for name, pid in self.stack.pids().items()}

    def differences_of_repeats(self, prompt_ids: Sequence[int]) -> tuple[str, ...]:
        """Ask twice for a greedy answer, from an empty cache each time; say how they differ."""
        answers = []
        for salt in ("first", "second"):
            ask = BenchRequest(list(prompt_ids), CHECKED_TOKENS)
            body = completion(self.model, ask) | {"seed": 1, "cache_salt": salt}
            del body["stream"], body["stream_options"]
            answers.append(self.post(body))
        texts = [answer["choices"][0]["text"] for answer in answers]
        problems = []
        if texts[0] != texts[1]:
            same = next(
                (at for at, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), 0
            )
            problems.append(f"a greedy request asked twice differs from character {same} on")
        for answer in answers:
            used = answer["usage"]
            if used["completion_tokens"] != CHECKED_TOKENS:
                problems.append(f"{used['completion_tokens']} tokens came of {CHECKED_TOKENS}")
            if used["prompt_tokens"] != len(prompt_ids):
                problems.append(f"{used['prompt_tokens']} prompt tokens of {len(prompt_ids)}")
        return tuple(problems)

    def leftovers(self) -> tuple[str, ...]:
        """Wait for all tables of all routers and workers to be empty; say what is left."""
        return wait_clean(self.stack, self._setup.num_routers)

    def stop(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Drain and end; returns the engine's account of its steps and what went wrong."""
        problems = []
        status = self.stack.stop(STOPPED_WITHIN_S)
        if status:
            problems.append(f"the server ended with status {status}")
        problems += errors_logged(self.stack)
        stopped = self.stack.logged("engine stopped")
        if not stopped:
            problems.append("compute did not say what its steps took")
        return (stopped[0] if stopped else {}), tuple(problems)


def wait_clean(stack: Stack, num_routers: int, within_s: float = CLEAN_WITHIN_S) -> tuple[str, ...]:
    """Ask for /health until nothing is open anywhere; returns what still is at the end.

    Routers share one port and any of them may answer, so it is asked several times.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        times = 1 if num_routers == 1 else 6 * num_routers
        left = {what for _ in range(times) for what in open_work(stack.health())}
        left |= set(pages_in_use(stack))
        if not left or time.monotonic() > deadline_s:
            return tuple(sorted(left))
        time.sleep(0.1)


def pages_in_use(stack: Stack) -> list[str]:
    """Say which replicas have KV pages in use, in full: /health rounds to a ten-thousandth."""
    with urllib.request.urlopen(stack.url + "/metrics", timeout=REQUEST_TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if line.startswith(KV_METRIC + "{")]
    if not samples:
        return [f"{KV_METRIC} is not among the metrics"]
    return [f"{name} is {value}" for name, value in samples if float(value)]


def open_work(health: Mapping[str, Any]) -> list[str]:
    """Name everything in an answer of /health that an idle server would not have."""
    found = [] if health["status"] == "ok" else [f"the status is {health['status']}"]
    found += [
        f"the router has {health[name]} {name}"
        for name in ("requests", "attempts", "queries")
        if health[name]
    ]
    found += [
        f"{each['service']}: {name} is {each[name]}"
        for each in health["instances"]
        for name in ("open", "num_running", "num_waiting", "kv_usage")
        if each[name]
    ]
    if missing := {"tokenizer", "compute", "detokenizer"} - {
        each["service"] for each in health["instances"]
    }:
        found.append(f"no {', '.join(sorted(missing))} is there")
    return found


def errors_logged(stack: Stack) -> list[str]:
    """Return the log's errors, the first few in full."""
    found = []
    for line in stack.log().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            if "Traceback" in line or "Error" in line:
                found.append(line[:200])
            continue
        if isinstance(entry, dict) and entry.get("level") in ("error", "critical"):
            found.append(f"{entry.get('event')}: {str(entry.get('error', ''))[:200]}")
    if not found:
        return []
    return [f"{len(found)} errors were logged, such as: {found[0]}"]
