"""Whether this replica computes what it should, in the time it should: pure, given the clock.

It knows neither steps nor requests, only what is counted of them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np

from services.compute.step import StepPlan

WINDOW_S = 30.0  # what is judged; and as long after the last fault the replica counts as ill
# Three requests, so that one that is at fault itself, as for half precision, makes nobody ill.
MIN_NONFINITE = 3
NONFINITE_RATIO = 0.25  # of the requests in work
# Three steps, so that a machine that stood still for once makes nobody ill; a step of a GPU takes
# milliseconds, and one on a CPU twice its time beside a noisy neighbour.
MIN_SLOW_STEPS = 3
SLOW_RATIO = 10.0
SLOW_S = 1.0
SMOOTHING = 0.2

StepKind: TypeAlias = tuple[int, int, int]


class _Counts(NamedTuple):
    at_s: float
    num_started: int
    num_nonfinite: int


class ReplicaHealth:
    """Requests with non-finite logits, and steps that took ten times what was expected.

    What is expected is learned per kind of step, from steps that were not slow: a replica that
    stays slow does not become the new normal. A step on a CPU takes the processor time of its
    thread: a machine that is busy with something else is not ill, and /ready would say so.
    """

    def __init__(self) -> None:
        self._expected_s: dict[StepKind, float] = {}
        self._slow_at_s: deque[float] = deque(maxlen=MIN_SLOW_STEPS)
        self._counts: deque[_Counts] = deque()  # of the window, a second apart
        self._num_nonfinite = 0
        self._wrong, self._wrong_until_s = "", 0.0
        self._slow, self._slow_until_s = "", 0.0

    def step_took(self, kind: StepKind, took_s: float, now_s: float) -> None:
        expected_s = self._expected_s.get(kind)
        if expected_s is None:
            self._expected_s[kind] = took_s
        elif took_s < max(SLOW_S, SLOW_RATIO * expected_s):
            self._expected_s[kind] = expected_s + SMOOTHING * (took_s - expected_s)
        else:
            self._slow_at_s.append(now_s)
            are_many = len(self._slow_at_s) == MIN_SLOW_STEPS
            if now_s < self._slow_until_s or (are_many and now_s - self._slow_at_s[0] <= WINDOW_S):
                self._slow = f"a step took {took_s:.1f} s; {expected_s:.2g} s were expected"
                self._slow_until_s = now_s + WINDOW_S

    def served(self, num_started: int, num_nonfinite: int, num_running: int, now_s: float) -> None:
        """Take what runs, and the numbers so far of sequences and of requests that went wrong."""
        counts = self._counts
        while len(counts) > 1 and now_s - counts[0].at_s > WINDOW_S:
            counts.popleft()  # the last one stays: what came before it is judged already
        before = counts[0] if counts else _Counts(now_s, 0, 0)
        if num_nonfinite > self._num_nonfinite:
            self._num_nonfinite = num_nonfinite
            num_wrong = num_nonfinite - before.num_nonfinite
            num_served = max(num_started - before.num_started, num_running, num_wrong)
            is_rate = num_wrong >= MIN_NONFINITE and num_wrong >= NONFINITE_RATIO * num_served
            if is_rate or now_s < self._wrong_until_s:
                self._wrong = f"non-finite logits in {num_wrong} of {num_served} requests"
                self._wrong_until_s = now_s + WINDOW_S
        if not counts or now_s - counts[-1].at_s >= 1.0:
            counts.append(_Counts(now_s, num_started, num_nonfinite))

    def trouble(self, now_s: float) -> str:
        """Say why no requests should come here; empty if nothing is wrong."""
        wrong = self._wrong if now_s < self._wrong_until_s else ""
        slow = self._slow if now_s < self._slow_until_s else ""
        return "; ".join(filter(None, (wrong, slow)))


def work_of(plan: StepPlan) -> StepKind:
    """The kind of a step: rows, prompt tokens, and what these and earlier tokens make attention do.

    Each to a power of two. Without the last a long context would look like an illness.
    """
    lengths_R, ends_R = plan.q_len.astype(np.float32), plan.pos_upper.astype(np.float32)
    num_prefill_tokens = plan.num_tokens - plan.num_decode_rows
    pairs = int(lengths_R @ ends_R)
    return plan.num_decode_rows.bit_length(), num_prefill_tokens.bit_length(), pairs.bit_length()
