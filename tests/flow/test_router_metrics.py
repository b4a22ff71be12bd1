"""`/metrics` and `/health`: what the heartbeats say, in Prometheus' format and as JSON."""

from __future__ import annotations

import re

from common.messages.control import Load, StepReport
from tests.flow.router_ring import Ring, chat, running_router, waiting

REPORT = StepReport(
    num_steps=1200,
    num_prefill_tokens=34,
    num_samples=5600,
    times=(("plan", 0.0001, 0.0002), ("host", 0.0005, 0.001), ("device", 0.004, 0.005)),
    device_idle_ratio=0.0125,
    num_preemptions=3,
)
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="[^"]*",?)*)\})? ([0-9.e+-]+)')


async def scraped(ring: Ring) -> dict[str, float]:
    """Scrape and parse, strictly: every sample is announced, and nothing is there twice."""
    async with ring.session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    assert text.endswith("\n")
    found: dict[str, float] = {}
    announced: set[str] = set()
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split()[2]
            assert current not in announced
            announced.add(current)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name == current
            assert kind == ("counter" if name.endswith("_total") else "gauge")
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == current
            key = line.rpartition(" ")[0]
            assert key not in found
            found[key] = float(match[3])
    return found


async def test_a_computes_steps_are_metrics() -> None:
    async with running_router() as ring:
        ring.beat("compute", load=Load(7, 3, 64, 0.25, REPORT))
        await ring.settle()
        metrics = await scraped(ring)
    assert {
        name.removeprefix("slipstream_compute_"): value
        for name, value in metrics.items()
        if name.startswith("slipstream_compute_")
    } == {
        'kv_cache_usage_ratio{replica="compute"}': 0.25,
        'steps_total{replica="compute"}': 1200,
        'prefill_tokens_total{replica="compute"}': 34,
        'sampled_tokens_total{replica="compute"}': 5600,
        'preemptions_total{replica="compute"}': 3,
        'step_seconds{replica="compute",phase="plan",quantile="0.5"}': 0.0001,
        'step_seconds{replica="compute",phase="plan",quantile="0.99"}': 0.0002,
        'host_cycle_seconds{replica="compute",quantile="0.5"}': 0.0005,
        'host_cycle_seconds{replica="compute",quantile="0.99"}': 0.001,
        'device_step_seconds{replica="compute",quantile="0.5"}': 0.004,
        'device_step_seconds{replica="compute",quantile="0.99"}': 0.005,
        'device_idle_ratio{replica="compute"}': 0.0125,
    }
    assert metrics['slipstream_worker_requests_running{service="compute",replica="compute"}'] == 7
    assert metrics['slipstream_worker_requests_waiting{service="compute",replica="compute"}'] == 3


async def test_open_requests_are_metrics() -> None:
    async with running_router() as ring:
        assert (await scraped(ring))["slipstream_router_requests_open"] == 0
        asking = await waiting(ring, chat(n=2))
        metrics = await scraped(ring)
        assert metrics["slipstream_router_ready"] == 1
        assert metrics["slipstream_router_requests_open"] == 1
        assert metrics["slipstream_router_attempts_open"] == 2
        asking.cancel()


async def test_a_router_alone_has_metrics_too() -> None:
    async with running_router(workers=False) as ring:
        metrics = await scraped(ring)
    assert metrics["slipstream_router_ready"] == 0
    assert metrics['slipstream_workers{service="compute"}'] == 0
    assert not any(name.startswith("slipstream_worker_") for name in metrics)


async def test_metrics_need_no_key() -> None:
    async with running_router(api_keys=("secret",)) as ring:
        assert await scraped(ring)
        async with ring.session.get("/timeline") as response:
            assert response.status == 401


async def test_health_has_the_steps_of_each_compute() -> None:
    async with running_router() as ring:
        ring.beat("compute", load=Load(7, 3, 64, 0.25, REPORT))
        await ring.settle()
        async with ring.session.get("/health") as response:
            body = await response.json()
    steps = {each["name"]: each.get("steps") for each in body["instances"]}
    assert steps["tokenizer"] is None
    assert steps["compute"] == {
        "count": 1200,
        "prefill_tokens": 34,
        "sampled_tokens": 5600,
        "preemptions": 3,
        "seconds": {
            "plan": {"p50": 0.0001, "p99": 0.0002},
            "host": {"p50": 0.0005, "p99": 0.001},
            "device": {"p50": 0.004, "p99": 0.005},
        },
        "device_idle_ratio": 0.0125,
    }
