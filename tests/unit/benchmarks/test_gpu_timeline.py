"""Steps and gaps of a run, out of a server's timeline."""

from __future__ import annotations

import math
from array import array

import pytest

from benchmarks.gpu_timeline import cut, device_times, open_times
from common.messages.queries import StagePart, Timeline, Track, TrackArg

PLANNED = (1.0, 2.0, 3.0, 9.0)


def track(name: str, spans: list[tuple[float, float]], lane: str = "host") -> Track:
    began_s, ended_s = (array("d", times) for times in zip(*spans, strict=True))
    number = TrackArg("step_id", array("d", range(len(spans))))
    return Track(lane, name, began_s, ended_s, (number,))


def timeline(steps: list[tuple[float, float]]) -> Timeline:
    """Steps planned a second apart, then one after a rest; each phase takes 1 ms, the wait 1 s."""
    tracks = [
        track(name, [(at + offset, at + offset + 0.001) for at in PLANNED])
        for name, offset in (("plan", 0.0), ("launch", 0.001), ("commit", 0.5), ("send", 0.501))
    ]
    tracks.append(track("wait", [(at + 0.1, at + 1.1) for at in PLANNED]))
    tracks.append(track("step", steps, "device"))
    other = StagePart("router", "router-0", 0.0, (track("take", [(1.0, 2.0)]),))
    return Timeline((other, StagePart("compute", "compute-0", 0.0, tuple(tracks))))


STEPS = [(1.0, 2.0), (2.0, 3.0), (3.5, 4.5), (9.0, 10.0)]


def test_a_gap_between_steps_is_idle_and_a_rest_without_requests_is_not() -> None:
    times = device_times(timeline(STEPS), [(0.5, 5.0), (0.9, 4.6), (8.9, 10.1)])
    assert times is not None
    assert times.steps == 4
    assert times.idle_share == pytest.approx(0.5 / 4.5)
    assert times.host_ms == pytest.approx(4.0)
    assert sum(times.host_parts_ms.values()) == pytest.approx(4.0)
    assert times.device_ms == pytest.approx(1000.0)


def test_a_gap_with_a_request_open_all_the_time_is_idle_however_long() -> None:
    times = device_times(timeline(STEPS), [(0.5, 10.1)])
    assert times is not None
    assert times.idle_share == pytest.approx(5.0 / 9.0)


def test_steps_of_other_runs_do_not_count() -> None:
    times = device_times(timeline(STEPS), [(0.5, 4.0)])
    assert times is not None
    assert times.steps == 3
    assert device_times(timeline(STEPS), [(20.0, 21.0)]) is None
    assert device_times(timeline(STEPS), []) is None


def test_a_device_that_tells_no_times_leaves_the_hosts() -> None:
    times = device_times(timeline([(math.nan, math.nan)] * 4), [(0.5, 10.1)])
    assert times is not None
    assert (times.idle_share, times.device_ms) == (None, None)
    assert times.host_ms == pytest.approx(4.0)


def test_a_server_without_a_timeline_has_no_times() -> None:
    assert device_times(Timeline(()), [(0.5, 10.1)]) is None


def test_open_times_are_merged() -> None:
    assert open_times([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5)]) == [(0.0, 2.5), (3.0, 4.0)]


def test_a_moment_can_be_cut_out() -> None:
    moment = cut(timeline(STEPS), 1.5, 3.2)
    (plan,) = (each for each in moment.parts[1].tracks if each.name == "plan")
    assert list(plan.began_s) == [2.0, 3.0]
    assert list(plan.args[0].values) == [1.0, 2.0]
    assert [len(each.began_s) for each in moment.parts[0].tracks] == [0]
