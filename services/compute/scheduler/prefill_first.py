"""Prefill first and alone, then decode: short waits for the first token, uneven ones after it."""

from __future__ import annotations

from services.compute.scheduler.policy import ANY_NUMBER, BatchView, Quota


class PrefillFirst:
    """A step is either prompts or decode rows, and prompts go first, as in early vLLM."""

    __slots__ = ()

    def quotas(self, view: BatchView, now_s: float) -> tuple[Quota, ...]:
        """Prompts if any can go on or start, else decode rows."""
        return (
            Quota(False, view.max_prefill_tokens, ANY_NUMBER),
            Quota(True, 0, 0),
        )

    def wake_at_s(self) -> float | None:
        """Time alone changes nothing."""
        return None
