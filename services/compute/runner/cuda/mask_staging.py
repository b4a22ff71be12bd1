"""A step's masks on their way to the device: one copy, and only of as many rows as there are.

Shape legend: S samples, G rows of bits, M words of a row.
"""

from __future__ import annotations

from collections.abc import Callable

from services.compute.kernels.slot_words import NO_MASK, VOID_MASK, MaskRows
from services.compute.runner.cuda.staging import Staging
from services.compute.step import Int32Array, StepPlan, TokenMasks


class MaskStaging:
    """Fills `MaskRows` for the samples of a step, in stream order before their sampling.

    Only steps with guided samples come here: no others look at the rows.
    """

    __slots__ = ("_max_samples", "_num_words", "_staging")

    def __init__(self, rows: MaskRows, num_buffers: int, wait: Callable[[], None]) -> None:
        """`num_buffers` and `wait` as for `Staging`."""
        self._max_samples, self._num_words = rows.bits_GM.shape
        self._staging = Staging(rows.packed, num_buffers, wait)

    def upload(self, plan: StepPlan, masks: TokenMasks | None) -> int:
        """Start the copy; return the upload's number.

        Raises ValueError where a guided sample is neither masked nor void: it could say anything.
        """
        missing = set(plan.guided)
        if masks is not None:
            missing.difference_update(masks.samples.tolist(), masks.void)
        if masks is None or missing:
            raise ValueError(f"step {plan.step_id}: no mask for guided samples {sorted(missing)}")
        size = pack_masks(masks, self._max_samples, self._num_words, self._staging.buffer())
        return self._staging.upload(size)

    def done(self, upload: int) -> None:
        """The device is past this upload."""
        self._staging.done(upload)


def pack_masks(masks: TokenMasks, max_samples: int, num_words: int, out: Int32Array) -> int:
    """Write masks as `MaskRows.packed` has them; return how many int32.

    Raises ValueError for rows of another width than the vocabulary's.
    """
    num_rows = len(masks.samples)
    if masks.bits.shape != (num_rows, num_words):
        raise ValueError(
            f"masks of {num_rows} samples are {list(masks.bits.shape)}, "
            f"not {[num_rows, num_words]} words"
        )
    row_of_S = out[:max_samples]
    row_of_S.fill(NO_MASK)
    row_of_S[list(masks.void)] = VOID_MASK
    row_of_S[masks.samples] = range(num_rows)
    end = max_samples + num_rows * num_words
    out[max_samples:end].reshape(num_rows, num_words)[:] = masks.bits
    return end
