"""What a device can do at most, by what its steps took, and which share of that it does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.busy_share import BusyShare

MIN_STEPS = 8


class StepProfile(NamedTuple):
    """A step's time: a part of its own, one for each row that decodes, one for each prompt token.

    With the most that fits into a step it gives the most tokens a second, 0 if nothing is known.
    """

    fixed_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0

    def tokens_per_s(self, each_s: float, number: int) -> float:
        step_s = self.fixed_s + each_s * number
        return number / step_s if step_s > 0 else 0.0


def fitted(steps: npt.NDArray[np.void]) -> StepProfile:
    """Fit the times of steps, records as `StepRecords` keeps them, by least squares."""
    on_device_s = steps["device_end_s"] - steps["device_start_s"]
    seconds = np.where(np.isnan(on_device_s), steps["commit_s"] - steps["launched_s"], on_device_s)
    known = ~np.isnan(seconds)
    if np.count_nonzero(known) < MIN_STEPS:
        return StepProfile()
    sizes = [np.ones(len(steps)), steps["decode_rows"], steps["prefill_tokens"]]
    parts, *_ = np.linalg.lstsq(np.stack(sizes, 1)[known], seconds[known], rcond=None)
    return StepProfile(*(max(0.0, float(part)) for part in parts))


class DeviceShare:
    """The share of its capacity that a device uses: of prefill and of decode, which add up.

    A device that computes all the time for one stream is not full: each step could have more rows.
    """

    def __init__(self, max_rows: int, max_prefill_tokens: int) -> None:
        self.profile = StepProfile()
        self._max_rows = max_rows
        self._max_prefill_tokens = max_prefill_tokens
        self._num_prefill_tokens = self._num_samples = 0
        self._work_s = 0.0
        self._share = BusyShare(lambda: self._work_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.profile.tokens_per_s(self.profile.token_s, self._max_prefill_tokens)

    @property
    def decode_tokens_per_s(self) -> float:
        return self.profile.tokens_per_s(self.profile.row_s, self._max_rows)

    def at(self, now_s: float, num_prefill_tokens: int, num_samples: int) -> float:
        """Return the smoothed share, given how much was computed since the start."""
        for done, most_per_s in (
            (num_prefill_tokens - self._num_prefill_tokens, self.prefill_tokens_per_s),
            (num_samples - self._num_samples, self.decode_tokens_per_s),
        ):
            self._work_s += done / most_per_s if most_per_s > 0 else 0.0
        self._num_prefill_tokens, self._num_samples = num_prefill_tokens, num_samples
        return self._share.at(now_s)
