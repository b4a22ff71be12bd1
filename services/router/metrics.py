"""What a router knows of itself and of the workers, in Prometheus' text format.

Everything comes from tables and heartbeats that are there anyway; a scrape costs some 50 µs a
worker, a token nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from services.router.dispatch import Dispatch
from services.router.fleet import SERVICES, Worker

HOST_PHASES = ("plan", "launch", "wait", "commit", "send")

Sample: TypeAlias = tuple[dict[str, str], float]


class Family(NamedTuple):
    """One metric with all its samples."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: list[Sample]


def exposition(dispatch: Dispatch) -> str:
    """Write all metrics of a router."""
    workers = list(dispatch.fleet.workers())
    families = (*_router(dispatch), *_workers(workers), *_computes(workers))
    return "".join(map(rendered, families))


def rendered(family: Family) -> str:
    """Write one metric; one without samples is left out."""
    if not family.samples:
        return ""
    lines = [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
    for labels, value in family.samples:
        pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        lines.append(f"{family.name}{{{pairs}}} {value!r}" if pairs else f"{family.name} {value!r}")
    return "\n".join(lines) + "\n"


def _router(dispatch: Dispatch) -> Iterator[Family]:
    def own(name: str, text: str, value: int) -> Family:
        return Family(f"slipstream_router_{name}", "gauge", text, [({}, value)])

    inflight = dispatch.inflight
    yield own("ready", "1 while new work is taken, else 0.", int(dispatch.ready))
    yield own("requests_open", "Requests that this router is answering.", inflight.num_requests)
    yield own("attempts_open", "Choices of them that are on the ring.", len(inflight))
    yield own("queries_open", "Questions to workers without an answer.", len(dispatch.queries))


def _workers(workers: list[Worker]) -> Iterator[Family]:
    counts = dict.fromkeys(SERVICES, 0)
    for worker in workers:
        counts[worker.service] += 1
    yield Family(
        "slipstream_workers",
        "gauge",
        "Workers that are registered here.",
        [({"service": service}, count) for service, count in counts.items()],
    )

    def each(name: str, text: str, values: Iterable[int]) -> Family:
        labels = ({"service": worker.service, "replica": worker.name} for worker in workers)
        samples: list[Sample] = list(zip(labels, values, strict=True))
        return Family(f"slipstream_worker_{name}", "gauge", text, samples)

    loads = [worker.load for worker in workers]
    yield each("requests_running", "Requests in work.", (load.num_running for load in loads))
    yield each("requests_waiting", "Requests in its queue.", (load.num_waiting for load in loads))
    yield each("capacity", "Requests that it works on at once.", (load.capacity for load in loads))
    yield each(
        "attempts_open",
        "Attempts of this router that it has state for.",
        (worker.num_open for worker in workers),
    )
    yield each("draining", "1 while it ends, else 0.", (int(each.draining) for each in workers))


def _computes(workers: list[Worker]) -> Iterator[Family]:
    computes = [(worker.name, worker.load) for worker in workers if worker.service == "compute"]
    reports = [(name, load.steps) for name, load in computes if load.steps is not None]

    def counter(name: str, text: str, values: Iterable[int]) -> Family:
        labels = ({"replica": replica} for replica, _ in reports)
        samples: list[Sample] = list(zip(labels, values, strict=True))
        return Family(f"slipstream_compute_{name}_total", "counter", text, samples)

    yield Family(
        "slipstream_compute_kv_cache_usage_ratio",
        "gauge",
        "Share of the KV cache's pages in use; pages kept for their prefix count as free.",
        [({"replica": name}, load.kv_usage) for name, load in computes],
    )
    yield counter("steps", "Steps of the engine.", (steps.num_steps for _, steps in reports))
    yield counter(
        "prefill_tokens",
        "Prompt tokens computed; what the prefix cache had is not among them.",
        (steps.num_prefill_tokens for _, steps in reports),
    )
    yield counter(
        "sampled_tokens",
        "Tokens sampled, with those discarded after a late stop.",
        (steps.num_samples for _, steps in reports),
    )
    yield counter(
        "preemptions",
        "Times that a sequence lost its KV pages to an older one, to be recomputed or swapped in.",
        (steps.num_preemptions for _, steps in reports),
    )
    times = {
        (replica, name): (("0.5", p50), ("0.99", p99))
        for replica, steps in reports
        for name, p50, p99 in steps.times
    }

    def quantiles(name: str, text: str, phases: tuple[str, ...], label: str = "") -> Family:
        samples: list[Sample] = [
            ({"replica": replica, **({label: phase} if label else {}), "quantile": rank}, value)
            for (replica, phase), values in times.items()
            if phase in phases
            for rank, value in values
        ]
        return Family(f"slipstream_compute_{name}_seconds", "gauge", text, samples)

    yield quantiles(
        "step",
        "Time of the host in each phase of a step, over the last thousand steps.",
        HOST_PHASES,
        "phase",
    )
    yield quantiles(
        "host_cycle",
        "Time of the host a step, from send to send, without what it waited for the device.",
        ("host",),
    )
    yield quantiles("device_step", "Time of the device a step.", ("device",))
    yield Family(
        "slipstream_compute_device_idle_ratio",
        "gauge",
        "Share of the device's time between two steps while there was work.",
        [
            ({"replica": replica}, steps.device_idle_ratio)
            for replica, steps in reports
            if steps.device_idle_ratio is not None
        ],
    )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
