"""The records of the last steps, and what is made of them when somebody asks."""

from __future__ import annotations

from math import isnan, nan

import numpy as np
import pytest

from services.compute.step import StepPlan
from services.compute.step_times import TIMES_INTERVAL_S, StepRecords

NONE = np.zeros(0, np.int32)
STEP_S = 0.010
START_S = 100.0


def plan_of(step_id: int, num_decode_rows: int = 3, num_prefill_tokens: int = 5) -> StepPlan:
    rows = np.zeros(num_decode_rows + 1, np.int32)
    tokens = np.zeros(num_decode_rows + num_prefill_tokens, np.int32)
    columns = (rows, rows, rows, rows, rows, tokens, rows, rows, NONE, NONE, NONE)
    return StepPlan(step_id, num_decode_rows, *columns)


def note_step(records: StepRecords, step_id: int, device_idle_s: float = 0.0) -> None:
    """Note a step of 10 ms: plan 1, launch 2, wait 3, commit 0.5, send 0.25, slept 1 ms.

    The rest, 2.25 ms, is the loop's own.
    """
    at_s = START_S + STEP_S * step_id
    number = records.launched(plan_of(step_id), at_s, at_s + 0.001, at_s + 0.003)
    records.taken(number, at_s + 0.005, at_s + 0.008, at_s + 0.0085, step_id, 2)
    records.on_device(number, at_s + device_idle_s, at_s + STEP_S)
    records.sent(at_s + 0.0085, at_s + 0.00875, 0.001)


def times_of(records: StepRecords, now_s: float = 0.0) -> dict[str, float]:
    return {name: p50 for name, p50, _ in records.times(now_s)}


def test_the_phases_of_a_step_are_told_apart() -> None:
    records = StepRecords()
    for step_id in range(50):
        note_step(records, step_id)
    assert times_of(records) == pytest.approx(
        {
            "plan": 0.001,
            "launch": 0.002,
            "wait": 0.003,
            "commit": 0.0005,
            "send": 0.00025,
            "host": STEP_S - 0.003 - 0.001,  # neither waited nor slept
            "device": STEP_S,
        }
    )


def test_a_slow_step_shows_in_the_last_percentile_alone() -> None:
    records = StepRecords()
    for step_id in range(100):
        number = records.launched(plan_of(step_id), 0.0, 0.5 if step_id in (7, 8) else 0.1, 1.0)
        records.taken(number, 2.0, 3.0, 4.0)
    (plan, *_) = records.times(0.0)
    assert plan == ("plan", pytest.approx(0.1), pytest.approx(0.5))


def test_idle_is_what_the_device_waits_between_steps_while_there_is_work() -> None:
    records = StepRecords()
    for step_id in range(10):
        note_step(records, step_id, device_idle_s=0.002)
    assert records.device_idle_ratio(0.0) == pytest.approx(9 * 2 / (9 * 2 + 10 * 8))


def test_a_gap_without_work_counts_neither_as_idle_nor_as_a_cycle() -> None:
    records = StepRecords()
    for step_id in (0, 1, 2, 100, 101):
        if step_id == 100:
            records.rested()
        note_step(records, step_id)
    assert records.device_idle_ratio(0.0) == 0.0
    _, _, longest_s = next(each for each in records.times(0.0) if each[0] == "host")
    assert longest_s == pytest.approx(0.006)


def test_what_the_device_does_not_tell_is_left_out() -> None:
    records = StepRecords()
    number = records.launched(plan_of(0), 0.0, 0.1, 0.2)
    assert set(times_of(records)) == {"plan", "launch"}
    records.taken(number, 0.3, 0.4, 0.5)
    assert set(times_of(records, TIMES_INTERVAL_S)) == {"plan", "launch", "wait", "commit"}
    assert records.device_idle_ratio(TIMES_INTERVAL_S) is None


def test_nothing_is_known_before_the_first_step() -> None:
    records = StepRecords()
    assert records.times(0.0) == ()
    assert records.device_idle_ratio(0.0) is None
    assert all(not track.began_s for track in records.tracks(0.0))


def test_between_two_heartbeats_the_times_stay_as_they_are() -> None:
    records = StepRecords()
    note_step(records, 0)
    before = records.times(10.0)
    note_step(records, 1)
    assert records.times(10.0 + 0.9 * TIMES_INTERVAL_S) == before
    assert "host" in times_of(records, 10.0 + TIMES_INTERVAL_S)


def test_the_ring_keeps_the_last_steps() -> None:
    records = StepRecords(capacity=8)
    for step_id in range(21):
        note_step(records, step_id)
    rows = records.last(100)
    assert rows["step_id"].tolist() == list(range(13, 21))
    assert records.last(3)["step_id"].tolist() == [18, 19, 20]


def test_mail_without_a_step_is_no_steps_mail() -> None:
    records = StepRecords()
    number = records.launched(plan_of(0), 0.0, 0.1, 0.2)
    records.sent(0.3, 0.4, 0.0)  # nothing was taken
    assert isnan(records.last(1)["sent_s"][0])
    records.taken(number, 1.0, 1.1, 1.2)
    records.sent(1.2, 1.3, 0.0)
    records.sent(5.0, 6.0, 0.0)
    assert records.last(1)["sent_s"].tolist() == [1.3]


def test_a_timeline_has_the_phases_on_the_host_and_the_steps_on_the_device() -> None:
    records = StepRecords()
    for step_id in range(10):
        note_step(records, step_id)
    number = records.launched(plan_of(10), START_S + 0.1, START_S + 0.101, START_S + 0.103)
    records.on_device(number, nan, nan)
    tracks = {track.name: track for track in records.tracks(START_S + 0.055)}
    assert list(tracks) == ["plan", "launch", "wait", "commit", "send", "step"]
    step = tracks["step"]
    assert step.lane == "device"
    assert {arg.name: arg.values.tolist() for arg in step.args} == {
        "step_id": [6, 7, 8, 9, 10],
        "decode_rows": [3] * 5,
        "prefill_tokens": [5] * 5,
        "samples": [4] * 5,
        "drafted": pytest.approx([6, 7, 8, 9, nan], nan_ok=True),
        "accepted": pytest.approx([2, 2, 2, 2, nan], nan_ok=True),
        "wasted": pytest.approx([4, 5, 6, 7, nan], nan_ok=True),
    }
    assert step.began_s.tolist()[:4] == pytest.approx([START_S + 0.01 * n for n in range(6, 10)])
    assert isnan(step.began_s[4])  # it has not been heard of yet
    for track in tracks.values():
        track.check()
