"""A server scales itself within the ranges that its user gave, and tells what it leaves to them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from services.launcher.autoscale import PAUSE_S, Autoscaler, CountRange, count_ranges
from services.launcher.replicas import ScaleError


def test_ranges_are_read_in_both_forms() -> None:
    assert count_ranges("tokenizers=1..4, compute=0..2,router=2..2") == {
        "router": CountRange(2, 2),
        "tokenizer": CountRange(1, 4),
        "compute": CountRange(0, 2),
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "should be SERVICE=N..M"),
        ("tokenizers=4", "should be SERVICE=N..M"),
        ("tokenisers=1..4", "there is no service 'tokenisers'; did you mean tokenizer"),
        ("detokenizers=0..2", "detokenizer: from 1 to 256"),
        ("compute=3..2", "the first number is above the second"),
    ],
)
def test_what_is_no_range_is_said(text: str, complaint: str) -> None:
    with pytest.raises(ScaleError, match=complaint):
        count_ranges(text)


class Counted:
    """Replicas that are numbers."""

    def __init__(self) -> None:
        self.counts = {"tokenizer": 1, "compute": 1, "detokenizer": 1}

    def count(self, service: str) -> int:
        return self.counts[service]

    async def scale(self, service: str, count: int) -> None:
        self.counts[service] = count


class Adjusted:
    """An autoscaler of compute and tokenizers, with a clock and desired numbers of the test's."""

    def __init__(self) -> None:
        self.replicas = Counted()
        self.now_s = 0.0
        self.wanted: Mapping[str, int] = {}
        ranges = {"compute": CountRange(1, 3), "tokenizer": CountRange(1, 2)}
        self.scaler = Autoscaler(self.replicas, ranges, self.desired, lambda: self.now_s)

    async def desired(self) -> Mapping[str, int]:
        return self.wanted

    def adjust(self, **wanted: int) -> dict[str, int]:
        self.wanted = wanted
        asyncio.run(self.scaler.adjust())
        return self.replicas.counts


def test_counts_follow_what_is_desired_within_their_ranges() -> None:
    adjusted = Adjusted()
    assert adjusted.adjust(compute=9, tokenizer=2, detokenizer=2) == {
        "compute": 3,
        "tokenizer": 2,
        "detokenizer": 1,
    }
    assert adjusted.adjust(compute=0)["compute"] == 1
    assert adjusted.replicas.counts["tokenizer"] == 2  # of which nothing was said


def test_after_a_process_that_cannot_start_no_other_is_tried_for_a_while() -> None:
    adjusted = Adjusted()
    adjusted.adjust(compute=2)
    adjusted.replicas.counts["compute"] = 1  # given up
    assert adjusted.adjust(compute=2)["compute"] == 1
    adjusted.now_s = PAUSE_S - 1.0
    assert adjusted.adjust(compute=2)["compute"] == 1
    adjusted.now_s = PAUSE_S
    assert adjusted.adjust(compute=2)["compute"] == 2


def test_a_user_scales_what_is_not_scaled_by_itself() -> None:
    adjusted = Adjusted()
    asyncio.run(adjusted.scaler.scale("detokenizer", 2))
    assert adjusted.scaler.count("detokenizer") == 2
    with pytest.raises(
        ScaleError, match=r"compute is scaled by --autoscale, which keeps it in 1\.\.3"
    ):
        asyncio.run(adjusted.scaler.scale("compute", 2))
