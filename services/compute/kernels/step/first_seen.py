"""Where a query begins to see, as kernels compute it of a span."""

from __future__ import annotations

import triton
import triton.language as tl

from services.compute.kernels.step.span import BEHIND_FIRST, AttentionSpan


def window_and_step(span: AttentionSpan) -> tuple[int, int]:
    """How many positions are seen up to the last multiple of a step at or before the query, that
    one included, and the step, which is compiled in: 1 for windows. 0 of 1: all are seen; 1 of 0:
    all but the first."""
    if span == BEHIND_FIRST:
        return 1, 0
    return (0, 1) if span.is_full else (span.back + 1, span.step)


@triton.jit
def step_begin(position, STEP: tl.constexpr):
    """The last multiple of STEP at or before a position; of 0 the second position."""
    if STEP > 1:
        position = position // STEP * STEP
    elif STEP == 0:
        position = tl.minimum(position, 1)
    return position
