"""What a step of so many rows takes on this device; `runner.row_costs` measures it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class StepCosts(NamedTuple):
    """Seconds of steps of decode rows, by their number; in between, and beyond, on a line.

    Those are of short contexts; every position that a row sees adds a little.
    """

    num_rows: tuple[int, ...]  # rising
    step_s: tuple[float, ...]
    position_s: float = 0.0

    def seconds(self, num_rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        inside: npt.NDArray[np.float64] = np.interp(num_rows, self.num_rows, self.step_s)
        if len(self.num_rows) < 2:
            return inside
        rise_s = (self.step_s[-1] - self.step_s[-2]) / (self.num_rows[-1] - self.num_rows[-2])
        beyond = np.maximum(np.asarray(num_rows) - self.num_rows[-1], 0)
        seconds: npt.NDArray[np.float64] = inside + beyond * max(rise_s, 0.0)
        return seconds
