"""What a step of so many rows takes on this device; `runner.row_costs` measures it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.integer[Any]]
Seconds: TypeAlias = npt.NDArray[np.float64]


class StepCosts(NamedTuple):
    """Seconds of steps of decode rows, by their number; in between, and beyond, on a line.

    Those are of short contexts; every position that a row sees adds a little, once for as many rows
    of a sequence as read it together. So do the passes of a drafter that computes, one for each
    draft of the row that has most.
    """

    num_rows: tuple[int, ...]  # rising
    step_s: tuple[float, ...]
    position_s: float = 0.0
    rows_together: int = 1
    pass_s: tuple[float, ...] = ()  # of the first of these rows; empty: drafts take nothing

    def seconds(self, num_rows: Numbers) -> Seconds:
        return _on_lines(num_rows, self.num_rows, self.step_s)

    def pass_seconds(self, num_rows: Numbers) -> Seconds:
        """Of a pass over so many rows; none takes nothing."""
        if not self.pass_s:
            return np.zeros(np.shape(num_rows))
        seconds = _on_lines(num_rows, self.num_rows[: len(self.pass_s)], self.pass_s)
        return np.where(np.asarray(num_rows) > 0, seconds, 0.0)


def _on_lines(at: Numbers, num_rows: tuple[int, ...], took_s: tuple[float, ...]) -> Seconds:
    inside: Seconds = np.interp(at, num_rows, took_s)
    if len(num_rows) < 2:
        return inside
    rise_s = (took_s[-1] - took_s[-2]) / (num_rows[-1] - num_rows[-2])
    beyond = np.maximum(np.asarray(at) - num_rows[-1], 0)
    seconds: Seconds = inside + beyond * max(rise_s, 0.0)
    return seconds
