"""`/metrics` and `/health`: what the heartbeats say, in Prometheus' format and as JSON."""

from __future__ import annotations

import re

from common.messages.arrays import uint32s, uint64s
from common.messages.control import DraftReport, Load, Signals, StepReport
from common.messages.experts import ExpertLoad
from common.messages.failure import Failure
from tests.flow.router_ring import CHAT, Ring, Script, chat, last_counter, running_router, waiting

REPORT = StepReport(
    num_steps=1200,
    num_prefill_tokens=34,
    num_samples=5600,
    times=(("plan", 0.0001, 0.0002), ("host", 0.0005, 0.001), ("device", 0.004, 0.005)),
    device_idle_ratio=0.0125,
    num_preemptions=3,
    num_draft_tokens=40,
    num_accepted_tokens=31,
    drafts=(DraftReport("ngram", 6, 10, (4, 2)), DraftReport("prediction", 10, 30, (10, 9, 6))),
)
SAMPLE = re.compile(r'([a-z0-9_:]+)(?:\{((?:[a-z_]+="[^"]*",?)*)\})? ([0-9.e+-]+)')
ENDINGS = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


async def scraped(ring: Ring) -> dict[str, float]:
    """Scrape and parse, strictly: every sample is announced, and nothing is there twice."""
    async with ring.session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    assert text.endswith("\n")
    found: dict[str, float] = {}
    announced: set[str] = set()
    current = kind = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split()[2]
            assert current not in announced
            announced.add(current)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name == current
            assert (kind == "counter") == name.endswith("_total")
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] in {current + ending for ending in ENDINGS[kind]}
            key = line.rpartition(" ")[0]
            assert key not in found
            found[key] = float(match[3])
    return found


async def test_each_service_says_what_it_needs() -> None:
    async with running_router(scaling_drain_s=5.0) as ring:
        for second in range(12):
            signals = Signals(0.9, queue_age_s=float(second), num_waiting_tokens=500, num_routers=2)
            ring.beat("compute", load=Load(64, 3, 64, 0.25, signals=signals))
            ring.beat(
                "tokenizer", "detokenizer", load=Load(1, 0, 64, signals=Signals(0.2, num_routers=2))
            )
            await ring.settle()
            ring.now_s += 1.0
            ring.actor.tick(ring.now_s)
        metrics = await scraped(ring)
        async with ring.session.get("/scaling?model=demo") as response:
            report = await response.json()
    labels = '{model_name="demo",service="compute"}'
    of_compute = {
        name.removeprefix("slipstream_").partition("{")[0]: value
        for name, value in metrics.items()
        if name.endswith(labels)
    }
    assert of_compute == {
        "service_replicas": 1,
        "service_utilization_ratio": 0.9,
        "requests_queued": 3,
        "queue_age_seconds": 11,
        "desired_replicas": 3,
    }
    assert report["desired_replicas"] == {"compute": 3, "tokenizer": 1, "detokenizer": 1}
    assert metrics['slipstream_service_replicas{model_name="",service="router"}'] == 2


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
        'draft_tokens_total{drafter="ngram",replica="compute"}': 10,
        'draft_tokens_total{drafter="prediction",replica="compute"}': 30,
        'accepted_tokens_total{drafter="ngram",replica="compute"}': 6,
        'accepted_tokens_total{drafter="prediction",replica="compute"}': 25,
        'step_seconds{phase="plan",quantile="0.5",replica="compute"}': 0.0001,
        'step_seconds{phase="plan",quantile="0.99",replica="compute"}': 0.0002,
        'host_cycle_seconds{quantile="0.5",replica="compute"}': 0.0005,
        'host_cycle_seconds{quantile="0.99",replica="compute"}': 0.001,
        'device_step_seconds{quantile="0.5",replica="compute"}': 0.004,
        'device_step_seconds{quantile="0.99",replica="compute"}': 0.005,
        'device_idle_ratio{replica="compute"}': 0.0125,
    }
    assert metrics['slipstream_worker_requests_running{replica="compute",service="compute"}'] == 7
    assert metrics['slipstream_worker_requests_waiting{replica="compute",service="compute"}'] == 3


async def test_the_tokens_of_experts_are_metrics_as_the_last_heartbeat_with_them_said() -> None:
    async with running_router() as ring:
        ring.beat("compute", experts=ExpertLoad(uint32s((1, 2)), uint64s((5, 3, 1 << 60, 0))))
        ring.beat("compute")
        await ring.settle()
        metrics = await scraped(ring)
    own = "slipstream_compute_expert_"
    assert {name: value for name, value in metrics.items() if name.startswith(own)} == {
        f'{own}tokens_total{{replica="compute",layer="1",expert="0"}}': 5,
        f'{own}tokens_total{{replica="compute",layer="1",expert="1"}}': 3,
        f'{own}tokens_total{{replica="compute",layer="2",expert="0"}}': 1 << 60,
        f'{own}tokens_total{{replica="compute",layer="2",expert="1"}}': 0,
        f'{own}imbalance_ratio{{replica="compute",layer="1"}}': 1.25,
        f'{own}imbalance_ratio{{replica="compute",layer="2"}}': 2,
    }


async def test_a_compute_is_an_engine_under_vllms_names() -> None:
    async with running_router() as ring:
        ring.beat("compute", load=Load(7, 3, 64, 0.25, REPORT))
        await ring.settle()
        metrics = await scraped(ring)
    engine = '{engine="compute",model_name="demo"}'
    assert {name: value for name, value in metrics.items() if name.endswith(engine)} == {
        f"vllm:num_requests_running{engine}": 7,
        f"vllm:num_requests_waiting{engine}": 3,
        f"vllm:kv_cache_usage_perc{engine}": 0.25,
        f"vllm:gpu_cache_usage_perc{engine}": 0.25,
        f"vllm:num_preemptions_total{engine}": 3,
        f"vllm:spec_decode_num_drafts_total{engine}": 16,
        f"vllm:spec_decode_num_draft_tokens_total{engine}": 40,
        f"vllm:spec_decode_num_accepted_tokens_total{engine}": 31,
    }
    by_place = f"vllm:spec_decode_num_accepted_tokens_per_pos_total{engine[:-1]},position="
    assert [metrics[f'{by_place}"{place}"}}'] for place in range(3)] == [14, 11, 6]


async def test_answers_are_counted_under_vllms_names() -> None:
    async with running_router() as ring:
        async with ring.post(CHAT, chat(n=2)) as response:
            assert response.status == 200
        metrics = await scraped(ring)
    model = '{model_name="demo"}'
    assert metrics[f"vllm:prompt_tokens_total{model}"] == 10
    assert metrics[f"vllm:prefix_cache_queries_total{model}"] == 10
    assert metrics[f"vllm:prefix_cache_hits_total{model}"] == 0
    assert metrics[f"vllm:generation_tokens_total{model}"] == 4
    assert metrics['vllm:request_success_total{finished_reason="stop",model_name="demo"}'] == 2
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert metrics[f"vllm:{name}_count{model}"] == 2
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert metrics[f"vllm:{name}_count{model}"] == 2
        assert metrics[f'vllm:{name}_bucket{{le="+Inf",model_name="demo"}}'] == 2
    assert metrics[f"vllm:request_prompt_tokens_sum{model}"] == 10
    assert metrics['vllm:request_prompt_tokens_bucket{le="2.0",model_name="demo"}'] == 0
    assert metrics['vllm:request_prompt_tokens_bucket{le="5.0",model_name="demo"}'] == 2


async def test_each_choice_adds_its_time_in_the_queue_and_that_of_its_prefill() -> None:
    async with running_router() as ring:
        ring.script = Script(queued_s=0.5)
        async with ring.post(CHAT, chat(n=2)) as response:
            assert response.status == 200
        metrics = await scraped(ring)
    model = '{model_name="demo"}'
    assert metrics[f"vllm:request_queue_time_seconds_sum{model}"] == 1.0
    assert metrics[f"vllm:request_queue_time_seconds_count{model}"] == 2
    assert metrics['vllm:request_queue_time_seconds_bucket{le="0.5",model_name="demo"}'] == 2
    assert metrics[f"vllm:request_prefill_time_seconds_count{model}"] == 2


async def test_requests_without_an_answer_are_counted_by_what_ended_them() -> None:
    async with running_router() as ring:
        left = await waiting(ring, chat(stream=True))
        failed = await waiting(ring, chat(n=2))
        ring.text(last_counter(ring), 0, "", 0, Failure(500, "nan", "not finite"))
        await failed
        left.cancel()
        await ring.until(ring.is_empty)
        metrics = await scraped(ring)
    finished = 'vllm:request_success_total{finished_reason="%s",model_name="demo"}'
    assert metrics[finished % "error"] == 2
    assert metrics[finished % "abort"] == 1


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
        "draft_tokens": 40,
        "accepted_tokens": 31,
        "seconds": {
            "plan": {"p50": 0.0001, "p99": 0.0002},
            "host": {"p50": 0.0005, "p99": 0.001},
            "device": {"p50": 0.004, "p99": 0.005},
        },
        "device_idle_ratio": 0.0125,
    }
