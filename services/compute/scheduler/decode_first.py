"""Decode first, with prefill in chunks in the same step: the default."""

from __future__ import annotations

from services.compute.scheduler.policy import ANY_NUMBER, BatchView, Quota


class DecodeFirst:
    """Every running sequence gets its token each step; prompts fill the rest of the budget.

    After Sarathi-Serve (chunked prefills, stall-free batching) and Orca (iteration level).
    """

    __slots__ = ()

    def quotas(self, view: BatchView, now_s: float) -> tuple[Quota, ...]:
        """One kind of step: mixed."""
        return (Quota(True, view.max_prefill_tokens, ANY_NUMBER),)

    def wake_at_s(self) -> float | None:
        """Time alone changes nothing."""
        return None
