"""What is made of a run's replies, and the page that shows it."""

from __future__ import annotations

from array import array
from dataclasses import asdict

import pytest

from benchmarks.__main__ import default_names, needs_gpu
from benchmarks.gpu import parse
from benchmarks.gpu_figures import RECORDED, GpuFigures, gpu_figures_of
from benchmarks.gpu_page import Findings, Row, idle_share, make_page, row_cells
from benchmarks.gpu_server import open_work
from benchmarks.gpu_timeline import DeviceTimes
from services.bench.client import LoadResult, Reply
from services.bench.figures import Spread
from services.bench.workloads import BenchRequest

ASKS = [BenchRequest([1000, 1001], 3), BenchRequest([1000], 2)]


def reply(number: int, prompt: int, output: int, sent_s: float = 0.0) -> Reply:
    """A reply whose tokens came 0.5 s apart, from a second after it was asked for on."""
    first_s = sent_s + 1.0
    last_s = first_s + 0.5 * (output - 1)
    return Reply(
        number,
        sent_s,
        first_s,
        last_s,
        last_s + 0.25,
        output,
        array("d", [0.5] * (output - 1)),
        {"prompt_tokens": prompt, "completion_tokens": output},
    )


def test_a_run_is_summed_up() -> None:
    outcome = LoadResult([reply(0, 2, 3), reply(1, 1, 2, sent_s=0.5)], [0.05, 0.2])
    figures = gpu_figures_of(ASKS, outcome, {"compute-0": 1.125, "router-0": 0.1, "router-1": 0.4})
    assert figures.problems == ()
    assert (figures.num_requests, figures.prompt_tokens, figures.output_tokens) == (2, 3, 5)
    assert figures.wall_s == 2.25
    assert figures.tokens_per_s == pytest.approx(5 / 2.25)
    assert (figures.ttft.p50_s, figures.itl.p50_s, figures.tpot.mean_s) == (1.0, 0.5, 0.5)
    assert figures.cpu_share("compute") == 0.5
    assert figures.cpu_share("router") == pytest.approx(0.4 / 2.25)
    assert figures.client_cpu_per_token_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        ([reply(0, 2, 3)], "1 requests never sent"),
        ([reply(0, 2, 2), reply(1, 1, 2)], "1 answers of another length (request 0: 2 for 3)"),
        ([reply(0, 3, 3), reply(1, 1, 2)], "1 prompts of another length (request 0: 3 for 2)"),
        ([Reply(0, 0.0, end_s=1.0, error="HTTP 500"), reply(1, 1, 2)], "request 0: HTTP 500"),
        ([Reply(0, 0.0, end_s=1.0), reply(1, 1, 2)], "1 answers without usage"),
    ],
)
def test_an_answer_that_is_not_as_asked_is_a_problem(replies: list[Reply], said: str) -> None:
    (problem,) = gpu_figures_of(ASKS, LoadResult(replies, [0.1]), {}).problems
    assert said in problem


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([], Spread(0.0, 0.0, 0.0, 0.0)),
        ([3.0], Spread(3.0, 3.0, 3.0, 3.0)),
        ([4.0, 1.0, 2.5], Spread(2.5, 2.5, 3.7, 3.97)),
        ([1.0, 0.0], Spread(0.5, 0.5, 0.9, 0.99)),
    ],
)
def test_percentiles_are_interpolated(values: list[float], spread: Spread) -> None:
    assert asdict(Spread.of(values)) == pytest.approx(asdict(spread))


def figures(tokens_per_s: float, device: DeviceTimes | None = None) -> GpuFigures:
    return GpuFigures(
        num_requests=4,
        num_failed=0,
        wall_s=2.0,
        prompt_tokens=512,
        output_tokens=int(2 * tokens_per_s),
        cached_tokens=0,
        num_events=int(2 * tokens_per_s),
        ttft=Spread(p50_s=0.010, p99_s=0.012),
        itl=Spread(p50_s=0.0012, p99_s=0.002),
        tpot=Spread(mean_s=0.0013),
        latency=Spread(),
        client_share=0.01,
        client_cpu_per_token_s=1e-5,
        cpu_s={"compute-0": 1.0},
        device=device,
    )


def test_a_row_is_held_against_vllm_the_targets_and_the_roof() -> None:
    recorded = RECORDED["llama-1b", "A"]
    device = DeviceTimes(100, 0.012, 0.25, 0.5, 1.1)
    assert row_cells(Row("llama-1b", "A", figures(900, device))) == [
        "llama-1b A",
        "900",
        "690",
        "1.30",
        f"{recorded.first:,.0f} ✓",
        f"{recorded.goal:,.0f} ✗",
        "1,505",
        "60",
        "10.0 (7.5)",
        "12.0 (10.1)",
        "1.20 (1.4)",
        "1.30 (1.44)",
        "0.50 (1.03)",
        "1.20",
        "0.250",
        "1.100",
    ]


def test_a_model_without_a_record_has_a_row_of_its_own_figures() -> None:
    cells = row_cells(Row("tiny", "A", figures(900)))
    assert cells[:4] == ["tiny A", "900", "–", "–"]
    assert len(cells) == len(row_cells(Row("llama-1b", "A", figures(900))))


def test_the_page_names_every_problem() -> None:
    findings = Findings(
        rows=[Row("llama-1b", "B", figures(20000))],
        engines=[("llama-1b", "one step ahead", 3.0, STOPPED)],
        checks=[("one", ()), ("two", ("it broke",))],
    )
    page = make_page(findings, "sim", ["seed 1"]).page
    assert findings.failed == ["two: it broke"]
    assert "- one: as it should be\n- two: it broke" in page


STOPPED = {
    "steps": 10,
    "plan_s": 0.001,
    "launch_s": 0.002,
    "wait_s": 0.04,
    "commit_s": 0.001,
    "device_busy_s": 0.06,
    "device_idle_s": 0.02,
}


def test_the_engines_last_line_tells_the_devices_idle_share() -> None:
    assert idle_share(STOPPED) == pytest.approx(0.25)
    assert idle_share({}) is None
    assert idle_share(STOPPED | {"device_busy_s": 0.0, "device_idle_s": 0.0}) is None


def test_all_sections_are_run_unless_some_are_named() -> None:
    assert parse([]).sections == ["checks", "workloads"]
    assert parse(["--sections", "checks"]).sections == ["checks"]
    with pytest.raises(SystemExit):
        parse(["--models", "llama-9b"])


def test_an_idle_servers_health_has_no_open_work() -> None:
    idle = {"open": 0, "num_running": 0, "num_waiting": 0, "kv_usage": 0.0}
    instances = [
        {"service": service, **idle} for service in ("tokenizer", "compute", "detokenizer")
    ]
    health = {"status": "ok", "requests": 0, "attempts": 0, "queries": 0, "instances": instances}
    assert open_work(health) == []
    busy = [*instances[:2], {**instances[2], "open": 2}]
    assert open_work({**health, "requests": 1, "instances": busy}) == [
        "the router has 1 requests",
        "detokenizer: open is 2",
    ]
    assert open_work({**health, "instances": instances[:2]}) == ["no detokenizer is there"]


def test_what_needs_a_gpu_runs_by_default_only_where_there_is_one() -> None:
    assert needs_gpu("gpu")
    assert not needs_gpu("ring")
    assert "ring" in default_names()
