"""Wrong keys: all are counted, few are logged, and who sends many has to wait."""

from __future__ import annotations

import pytest
import structlog

from services.router.errors import ApiError
from services.router.refused_keys import (
    DELAY_S,
    FREE_ATTEMPTS,
    LOG_INTERVAL_S,
    MAX_ADDRESSES,
    MAX_WAITING,
    WINDOW_S,
    RefusedKeys,
)


def delays(refused: RefusedKeys, address: str, now_s: float, number: int) -> list[float]:
    """Note this many wrong keys of an address."""
    return [refused.note(address, now_s) for _ in range(number)]


def test_the_first_attempts_are_free_and_the_next_wait() -> None:
    refused = RefusedKeys()
    assert delays(refused, "1.2.3.4", 0.0, FREE_ATTEMPTS) == [0.0] * FREE_ATTEMPTS
    assert delays(refused, "1.2.3.4", 1.0, 3) == [DELAY_S] * 3
    assert refused.note("1.2.3.5", 1.0) == 0.0, "another address"
    assert refused.note("1.2.3.4", WINDOW_S) == 0.0, "a new window"
    assert refused.num_refused == FREE_ATTEMPTS + 5


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::strange::", "::strange::", True),
        ("", "", True),
    ],
)
def test_an_ipv6_network_counts_as_one_client(first: str, second: str, is_same: bool) -> None:
    refused = RefusedKeys()
    delays(refused, first, 0.0, FREE_ATTEMPTS)
    assert (refused.note(second, 0.0) > 0) == is_same


def test_the_table_is_bounded_and_keeps_those_who_still_guess() -> None:
    refused = RefusedKeys()
    delays(refused, "1.2.3.4", 0.0, FREE_ATTEMPTS)
    for number in range(3 * MAX_ADDRESSES):
        refused.note(f"10.0.{number >> 8}.{number & 255}", 1.0)
        assert refused.note("1.2.3.4", 1.0) == DELAY_S
    assert len(refused._attempts) == MAX_ADDRESSES


def test_no_more_answers_are_held_back_than_fit() -> None:
    refused = RefusedKeys()
    refused.num_waiting = MAX_WAITING
    delays(refused, "1.2.3.4", 0.0, FREE_ATTEMPTS)
    with pytest.raises(ApiError) as caught:
        refused.note("1.2.3.4", 0.0)
    assert caught.value.failure.status == 429


def test_the_log_has_a_line_an_interval() -> None:
    refused = RefusedKeys()
    with structlog.testing.capture_logs() as logs:
        for tick in range(300):
            refused.note("1.2.3.4", tick * LOG_INTERVAL_S / 100)
    assert [log["number"] for log in logs] == [1, 100, 100]
    assert {log["last_from"] for log in logs} == {"1.2.3.4"}
