"""Callers: when a request has taken too long, and for what."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.router.admission import Client
from services.router.caller import ANYBODY, TIMED_OUT, WAITED, Caller

TIMES = st.floats(0.0, 1e6) | st.just(math.inf)


@given(TIMES, TIMES, st.floats(0.0, 1e6), st.booleans())
def test_the_clients_own_timeout_comes_first_and_a_wait_ends_with_the_first_token(
    begin_by_s: float, end_by_s: float, now_s: float, has_begun: bool
) -> None:
    spent = Caller(Client("a"), begin_by_s=begin_by_s, end_by_s=end_by_s).spent(now_s, has_begun)
    if now_s >= end_by_s:
        assert spent is TIMED_OUT
    elif now_s >= begin_by_s and not has_begun:
        assert spent is WAITED
    else:
        assert spent is None


def test_one_who_has_something_of_the_answer_may_still_run_out_of_time() -> None:
    caller = Caller(Client("a"), begin_by_s=1.0, end_by_s=2.0).after_begin()
    assert caller.spent(1.5, has_begun=False) is None
    assert caller.spent(2.0, has_begun=False) is TIMED_OUT
    assert caller.has_begun


def test_without_limits_a_request_may_take_for_ever() -> None:
    assert ANYBODY.spent(1e300, has_begun=False) is None
