"""What a device can do at most is read off the times of its steps."""

from __future__ import annotations

import numpy as np
import pytest

from services.compute.step_profile import DeviceShare, StepProfile, fitted
from services.compute.step_times import _RECORD


def steps(sizes: list[tuple[int, int]], on_device: bool = True) -> np.ndarray:
    """Steps that took 5 ms, 0.1 ms for a row and 0.02 ms for a token."""
    table = np.full(len(sizes), np.nan, _RECORD)
    for step, (rows, tokens) in zip(table, sizes, strict=True):
        seconds = 0.005 + 0.0001 * rows + 0.00002 * tokens
        begin, end = ("device_start_s", "device_end_s") if on_device else ("launched_s", "commit_s")
        step["decode_rows"], step["prefill_tokens"] = rows, tokens
        step[begin], step[end] = 1.0, 1.0 + seconds
    return table


SIZES = [(1, 0), (2, 0), (4, 100), (8, 0), (8, 900), (9, 0), (10, 300), (64, 0), (60, 512)]


@pytest.mark.parametrize("on_device", [True, False])
def test_a_profile_is_fitted_to_steps(on_device: bool) -> None:
    profile = fitted(steps(SIZES, on_device))
    assert profile == pytest.approx(StepProfile(0.005, 0.0001, 0.00002))
    assert profile.tokens_per_s(profile.row_s, 100) == pytest.approx(100 / 0.015)
    assert profile.tokens_per_s(profile.token_s, 1000) == pytest.approx(1000 / 0.025)


def test_of_few_steps_nothing_is_known() -> None:
    profile = fitted(steps(SIZES[:3]))
    assert profile == StepProfile()
    assert profile.tokens_per_s(profile.row_s, 100) == 0.0


def test_steps_of_one_size_give_no_negative_parts() -> None:
    assert min(fitted(steps([(4, 0)] * 20))) >= 0.0


def test_one_stream_leaves_room_though_the_device_is_never_idle() -> None:
    share = DeviceShare(max_rows=100, max_prefill_tokens=1000)
    share.profile = StepProfile(0.005, 0.0001, 0.00002)
    for second in range(60):
        used = share.at(float(second), 0, second * 196)  # as fast as one stream can go
    assert used == pytest.approx(196 / share.decode_tokens_per_s, rel=0.01)


def test_prefill_and_decode_add_up() -> None:
    share = DeviceShare(max_rows=100, max_prefill_tokens=1000)
    share.profile = StepProfile(0.005, 0.0001, 0.00002)
    prefill, decode = share.prefill_tokens_per_s * 0.3, share.decode_tokens_per_s * 0.5
    for second in range(60):
        used = share.at(float(second), int(prefill * second), int(decode * second))
    assert used == pytest.approx(0.8, abs=0.01)
