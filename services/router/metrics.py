"""`/metrics`: what a router knows of itself, of the workers and of its requests, for Prometheus.

Everything is read at the scrape from tables, heartbeats and request statistics. What a dashboard or
an autoscaler made for vLLM reads is there a second time, under vLLM's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, zip_longest
from typing import TypeAlias, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.messages.control import DraftReport, StepReport
from services.router.dispatch import Dispatch
from services.router.groups import SERVICES, RegisteredWorker
from services.router.refused_keys import RefusedKeys
from services.router.request_stats import Histogram, RequestStats
from services.router.service_signals import PoolReport, ServiceSignals

T = TypeVar("T")
Labelled: TypeAlias = Sequence[tuple[tuple[str, ...], T]]  # label values, and what they are of
Row: TypeAlias = tuple[str, str, Callable[[T], float | None]]  # name, help, value

HOST_PHASES = ("plan", "launch", "wait", "commit", "send")
QUANTILES = ("0.5", "0.99")

ROUTER_GAUGES: tuple[Row[Dispatch], ...] = (
    ("ready", "1 while new requests are accepted, else 0.", lambda router: int(router.ready)),
    (
        "requests_open",
        "Requests that this router is answering.",
        lambda router: router.inflight.num_requests,
    ),
    ("attempts_open", "Their choices on the ring.", lambda router: len(router.inflight)),
    ("queries_open", "Queries to workers without an answer.", lambda router: len(router.queries)),
)
REFUSED_KEYS: Row[RefusedKeys] = (
    "refused_keys",
    "Requests with an API key that is not known.",
    lambda refused: refused.num_refused,
)
WORKER_GAUGES: tuple[Row[RegisteredWorker], ...] = (
    ("requests_running", "Requests in work.", lambda worker: worker.load.num_running),
    ("requests_waiting", "Requests in its queue.", lambda worker: worker.load.num_waiting),
    ("capacity", "Requests that it works on at once.", lambda worker: worker.load.capacity),
    (
        "attempts_open",
        "Attempts of this router that it has state for.",
        lambda worker: worker.num_open,
    ),
    ("draining", "1 while it drains, else 0.", lambda worker: int(worker.draining)),
    (
        "unhealthy",
        "1 while it answers wrongly or much too late, else 0.",
        lambda worker: int(bool(worker.trouble)),
    ),
)
POOL_GAUGES: tuple[Row[PoolReport], ...] = (
    ("service_replicas", "Replicas that take requests.", lambda report: report.seen.replicas),
    (
        "service_utilization_ratio",
        "Share in use of what limits the service, over the last seconds.",
        lambda report: report.utilization,
    ),
    ("requests_queued", "Requests that wait for the service.", lambda report: report.num_queued),
    (
        "queue_age_seconds",
        "Time that the oldest of them has waited.",
        lambda report: report.queue_age_s,
    ),
)
KV_USAGE: Row[RegisteredWorker] = (
    "kv_cache_usage_ratio",
    "Share of the KV cache's pages in use; pages kept for their prefix count as free.",
    lambda worker: worker.load.kv_usage,
)
STEP_COUNTERS: tuple[Row[StepReport], ...] = (
    ("steps", "Steps of the engine.", lambda report: report.num_steps),
    (
        "prefill_tokens",
        "Prompt tokens computed, without those that were in the prefix cache.",
        lambda report: report.num_prefill_tokens,
    ),
    (
        "sampled_tokens",
        "Tokens sampled, including those discarded after a late stop.",
        lambda report: report.num_samples,
    ),
    (
        "preemptions",
        "Times that a sequence lost its KV pages to an older one, to be recomputed or swapped in.",
        lambda report: report.num_preemptions,
    ),
)
DRAFT_COUNTERS: tuple[Row[DraftReport], ...] = (
    (
        "draft_tokens",
        "Guessed tokens that steps computed behind those they followed.",
        lambda report: report.num_drafts,
    ),
    ("accepted_tokens", "Those that were right.", lambda report: sum(report.accepted)),
)
DEVICE_IDLE: Row[StepReport] = (
    "device_idle_ratio",
    "Share of the device's time between two steps while there was work.",
    lambda report: report.device_idle_ratio,
)
# From here on the names are vLLM's. Some have two, the second of which is older.
ENGINE_GAUGES: tuple[Row[RegisteredWorker], ...] = (
    ("num_requests_running", "Requests in work.", lambda worker: worker.load.num_running),
    ("num_requests_waiting", "Requests in the queue.", lambda worker: worker.load.num_waiting),
    ("kv_cache_usage_perc", "KV cache usage; 1 is full.", lambda worker: worker.load.kv_usage),
    ("gpu_cache_usage_perc", "KV cache usage; 1 is full.", lambda worker: worker.load.kv_usage),
)
ENGINE_COUNTERS: tuple[Row[StepReport], ...] = (
    ("num_preemptions", "Preemptions.", lambda report: report.num_preemptions),
    (
        "spec_decode_num_drafts",
        "Rows that had draft tokens.",
        lambda report: sum(each.num_rows for each in report.drafts),
    ),
    (
        "spec_decode_num_draft_tokens",
        "Draft tokens.",
        lambda report: report.num_draft_tokens,
    ),
    (
        "spec_decode_num_accepted_tokens",
        "Accepted draft tokens.",
        lambda report: report.num_accepted_tokens,
    ),
)
ACCEPTED_BY_PLACE: Row[int] = (
    "spec_decode_num_accepted_tokens_per_pos",
    "Accepted draft tokens by their position behind the row's token.",
    lambda number: number,
)
REQUEST_COUNTERS: tuple[Row[RequestStats], ...] = (
    ("prompt_tokens", "Tokens of prompts.", lambda stats: stats.num_prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda stats: stats.num_generated_tokens),
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.num_prompt_tokens,
    ),
    (
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.num_cached_tokens,
    ),
)
RETRIES: Row[RequestStats] = (
    "request_retries",
    "Attempts at answers after the first, on another worker or the same one started again.",
    lambda stats: stats.num_retries,
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[RequestStats], Histogram]], ...] = (
    (
        "time_to_first_token_seconds",
        "Time from admission to the first token.",
        lambda stats: stats.first_token_s,
    ),
    (
        "inter_token_latency_seconds",
        "Time between two tokens of an answer.",
        lambda stats: stats.inter_token_s,
    ),
    (
        "time_per_output_token_seconds",
        "Time between two tokens of an answer.",
        lambda stats: stats.inter_token_s,
    ),
    (
        "e2e_request_latency_seconds",
        "Time from admission to the end.",
        lambda stats: stats.latency_s,
    ),
    (
        "request_queue_time_seconds",
        "Time that a request waited at compute before its first step.",
        lambda stats: stats.queue_s,
    ),
    (
        "request_prefill_time_seconds",
        "Time to the first token without the time in the queue.",
        lambda stats: stats.prefill_s,
    ),
    (
        "request_decode_time_seconds",
        "Time from the first token to the end.",
        lambda stats: stats.decode_s,
    ),
    ("request_prompt_tokens", "Tokens of a prompt.", lambda stats: stats.prompt_tokens),
    ("request_generation_tokens", "Tokens of an answer.", lambda stats: stats.generated_tokens),
)


def exposition(dispatch: Dispatch, refused: RefusedKeys, signals: ServiceSignals) -> bytes:
    """Write all metrics of a router in Prometheus' text format."""
    return generate_latest(RouterCollector(dispatch, refused, signals))


class RouterCollector(Collector):
    """Collects the metrics of a router; those without samples are left out."""

    def __init__(self, dispatch: Dispatch, refused: RefusedKeys, signals: ServiceSignals) -> None:
        self._dispatch = dispatch
        self._refused = refused
        self._signals = signals

    def collect(self) -> Iterator[Metric]:
        workers = list(self._dispatch.fleet.workers())
        families = (
            *_gauges("slipstream_router_", (), [((), self._dispatch)], *ROUTER_GAUGES),
            *_counters("slipstream_router_", (), [((), self._refused)], REFUSED_KEYS),
            *_workers(workers),
            *_services(self._signals),
            *_computes([worker for worker in workers if worker.service == "compute"]),
            *_requests(list(self._dispatch.inflight.stats.items())),
        )
        return (family for family in families if family.samples)


def _workers(workers: Sequence[RegisteredWorker]) -> Iterator[Metric]:
    counts = dict.fromkeys(SERVICES, 0)
    for worker in workers:
        counts[worker.service] += 1
    count: Row[int] = ("workers", "Workers that are registered here.", lambda number: number)
    by_service = [((service,), number) for service, number in counts.items()]
    yield from _gauges("slipstream_", ("service",), by_service, count)
    labelled = [((worker.service, worker.name), worker) for worker in workers]
    yield from _gauges("slipstream_worker_", ("service", "replica"), labelled, *WORKER_GAUGES)


def _services(signals: ServiceSignals) -> Iterator[Metric]:
    desired: Row[PoolReport] = (
        "desired_replicas",
        "Replicas that the service should have.",
        lambda report: signals.desired(report.pool),
    )
    labelled = [((each.pool.service, each.pool.model), each) for each in signals.reports]
    yield from _gauges("slipstream_", ("service", "model_name"), labelled, *POOL_GAUGES, desired)


def _computes(computes: Sequence[RegisteredWorker]) -> Iterator[Metric]:
    """Yield the metrics of compute workers, each of which is what vLLM calls an engine."""
    own = "slipstream_compute_"
    replicas = [((worker.name,), worker) for worker in computes]
    reports = [(labels, worker.load.steps) for labels, worker in replicas if worker.load.steps]
    yield from _gauges(own, ("replica",), replicas, KV_USAGE)
    yield from _counters(own, ("replica",), reports, *STEP_COUNTERS)
    drafts = [
        ((replica, each.drafter), each) for (replica,), report in reports for each in report.drafts
    ]
    yield from _counters(own, ("replica", "drafter"), drafts, *DRAFT_COUNTERS)
    yield from _step_times(reports)
    yield from _gauges(own, ("replica",), reports, DEVICE_IDLE)
    names, engines = ("model_name", "engine"), [((w.model.name, w.name), w) for w in computes]
    yield from _gauges("vllm:", names, engines, *ENGINE_GAUGES)
    steps = [(labels, w.load.steps) for labels, w in engines if w.load.steps]
    yield from _counters("vllm:", names, steps, *ENGINE_COUNTERS)
    by_place = [
        ((*labels, str(place)), sum(numbers))
        for labels, report in steps
        for place, numbers in enumerate(
            zip_longest(*(each.accepted for each in report.drafts), fillvalue=0)
        )
    ]
    yield from _counters("vllm:", (*names, "position"), by_place, ACCEPTED_BY_PLACE)


def _step_times(reports: Labelled[StepReport]) -> Iterator[Metric]:
    phases = GaugeMetricFamily(
        "slipstream_compute_step_seconds",
        "Time of the host in each phase of a step, over the last thousand steps.",
        labels=("replica", "phase", "quantile"),
    )
    host = GaugeMetricFamily(
        "slipstream_compute_host_cycle_seconds",
        "Time of the host per step, from send to send, without its waits for the device.",
        labels=("replica", "quantile"),
    )
    device = GaugeMetricFamily(
        "slipstream_compute_device_step_seconds",
        "Time of the device per step.",
        labels=("replica", "quantile"),
    )
    for (replica,), report in reports:
        for name, *times in report.times:
            for quantile, time_s in zip(QUANTILES, times, strict=True):
                if name in HOST_PHASES:
                    phases.add_metric((replica, name, quantile), time_s)
                elif name == "host":
                    host.add_metric((replica, quantile), time_s)
                elif name == "device":
                    device.add_metric((replica, quantile), time_s)
    yield from (phases, host, device)


def _requests(by_model: Sequence[tuple[str, RequestStats]]) -> Iterator[Metric]:
    labelled = [((model,), stats) for model, stats in by_model]
    yield from _counters("vllm:", ("model_name",), labelled, *REQUEST_COUNTERS)
    yield from _counters("slipstream_", ("model_name",), labelled, RETRIES)
    finished: Row[int] = ("request_success", "Requests that ended.", lambda number: number)
    by_reason = [
        ((model, reason), number)
        for model, stats in by_model
        for reason, number in stats.num_finished.items()
    ]
    yield from _counters("vllm:", ("model_name", "finished_reason"), by_reason, finished)
    for name, text, value in HISTOGRAMS:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=("model_name",))
        for labels, stats in labelled:
            histogram = value(stats)
            bounds = (*map(floatToGoString, histogram.bounds), "+Inf")
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric(labels, buckets, histogram.sum)
        yield family


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    prefix: str,
    labels: Sequence[str],
    labelled: Labelled[T],
    *rows: Row[T],
) -> Iterator[Metric]:
    for name, text, value_of in rows:
        family = kind(f"{prefix}{name}", text, labels=labels)
        for values, one in labelled:
            value = value_of(one)
            if value is not None:
                family.add_metric(values, value)
        yield family


_gauges = partial(_families, GaugeMetricFamily)
_counters = partial(_families, CounterMetricFamily)
