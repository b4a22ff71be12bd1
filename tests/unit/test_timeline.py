"""From the parts of all processes to a trace that Perfetto and Chrome can draw."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from math import nan
from typing import Any

import pytest

from common.messages.arrays import uint32s, uint64s
from common.messages.experts import ExpertLoad
from common.messages.queries import StagePart, Timeline, Track, TrackArg
from services.timeline import (
    Span,
    TimelineError,
    chrome_trace,
    expert_table,
    fetch,
    share_during,
    summary,
)


def track_of(lane: str, name: str, *spans: tuple[float, float], **args: list[float]) -> Track:
    return Track(
        lane,
        name,
        array("d", [began_s for began_s, _ in spans]),
        array("d", [ended_s for _, ended_s in spans]),
        tuple(TrackArg(name, array("d", values)) for name, values in args.items()),
    )


ROUTER = StagePart("router", "router-0", 1000.0, (track_of("text", "write", (1.5, 1.75)),))
COMPUTE = StagePart(
    "compute",
    "compute-0",
    1000.00001,
    (
        track_of("host", "plan", (1.0, 1.125), step_id=[1]),
        track_of("host", "launch", (1.125, 1.25), step_id=[1]),
        track_of("device", "step", (1.25, 2.0), (2.0, 3.0), (nan, nan), step_id=[1, 2, 3]),
    ),
)


def drawn(trace: dict[str, Any]) -> list[tuple[str, str, str, float, float]]:
    """Return (process, thread, name, begin, duration in ms) of what is drawn."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    return [
        (
            names["process_name", event["pid"], 0],
            names["thread_name", event["pid"], event["tid"]],
            event["name"],
            event["ts"] / 1e3,
            event["dur"] / 1e3,
        )
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


def test_every_process_and_lane_has_a_line_in_the_order_of_the_ring() -> None:
    trace = chrome_trace(Timeline((ROUTER, COMPUTE)))
    assert drawn(trace) == [
        ("compute-0", "host", "plan", 0, 125),
        ("compute-0", "host", "launch", 125, 125),
        ("compute-0", "device", "step", 250, 750),
        ("compute-0", "device", "step", 1000, 1000),
        ("router-0", "text", "write", 500, 250),
    ]
    steps = [event for event in trace["traceEvents"] if event["name"] == "step"]
    assert [event["args"] for event in steps] == [{"step_id": 1}, {"step_id": 2}]
    json.dumps(trace, allow_nan=False)


def test_a_part_of_another_host_is_moved_onto_the_routers_clock() -> None:
    away = StagePart("compute", "gpu-host:7000", 400.0, (track_of("device", "step", (601.5, 602)),))
    spans = drawn(chrome_trace(Timeline((ROUTER, away))))
    assert [span[3] for span in spans] == [0, 0]


def test_spans_that_overlap_are_drawn_below_each_other() -> None:
    prompts = track_of("prompts", "tokenize", (1, 3), (2, 4), (3.5, 5), (4.5, 5))
    part = StagePart("tokenizer", "tokenizer-0", 0.0, (prompts,))
    threads = [(span[1], span[3]) for span in drawn(chrome_trace(Timeline((part,))))]
    assert threads == [
        ("prompts", 0),
        ("prompts", 2500),
        ("prompts 2", 1000),
        ("prompts 2", 3500),
    ]


def test_an_idle_server_has_an_empty_trace() -> None:
    empty = StagePart("router", "router-0", 0.0, (track_of("text", "write"),))
    assert drawn(chrome_trace(Timeline((empty,)))) == []
    assert summary(Timeline((empty,))) == []


def test_the_share_of_work_that_lies_within_other_work() -> None:
    def spans(*pairs: tuple[float, float]) -> list[Span]:
        return [Span("", began_s, ended_s, {}) for began_s, ended_s in pairs]

    steps = spans((0, 1), (1, 2), (3, 4))
    assert share_during(spans((0.5, 1.5)), steps) == 1.0
    assert share_during(spans((1.5, 2.5)), steps) == pytest.approx(0.5)
    assert share_during(spans((1.5, 3.5)), steps) == pytest.approx(0.5)
    assert share_during(spans((2, 3), (0, 1)), steps) == pytest.approx(0.5)
    assert share_during([], steps) == 0.0


def test_the_summary_says_how_busy_the_device_was_and_what_went_on_meanwhile() -> None:
    assert summary(Timeline((ROUTER, COMPUTE))) == [
        "compute-0: 2 steps in 1.75 s, device busy 100.0%",
        "router-0: 100.0% of its work was done while a step ran",
    ]


def test_the_summary_says_what_became_of_drafts() -> None:
    drafts = {"drafted": [7.0, nan], "wasted": [3.0, nan]}
    step = track_of("device", "step", (1.0, 2.0), (2.0, 3.0), **drafts)
    (line,) = summary(Timeline((replace(COMPUTE, tracks=(step,)),)))
    assert line.endswith("busy 100.0%, 7 tokens drafted, of which 4 accepted and 3 wasted")


def test_the_busiest_experts_of_each_layer_are_a_table_and_all_are_in_the_trace() -> None:
    tokens = uint64s((100, 0, 600, 200, 50, 50, *[0] * 6))
    part = replace(COMPUTE, experts=ExpertLoad(uint32s((1, 30)), tokens))
    timeline = Timeline((ROUTER, part))
    assert expert_table(timeline) == [
        "compute-0: tokens by expert since its start",
        "layer         tokens max/mean  busiest experts, with their shares",
        "    1          1,000     3.60      2 (60.0%)    3 (20.0%)    0 (10.0%)    4 (5.0%)",
        "   30              0     1.00      0 (0.0%)    1 (0.0%)    2 (0.0%)    3 (0.0%)",
    ]
    by_layer = {"1": tokens[:6].tolist(), "30": [0] * 6}
    assert chrome_trace(timeline)["otherData"] == {"expert_tokens": {"compute-0": by_layer}}
    assert expert_table(Timeline((ROUTER, COMPUTE))) == []


def test_a_server_that_is_not_there_is_said_plainly() -> None:
    with pytest.raises(TimelineError, match="is the server there"):
        fetch("http://127.0.0.1:1", 1.0)
    with pytest.raises(TimelineError, match="unknown url type"):
        fetch("localhost", 1.0)
