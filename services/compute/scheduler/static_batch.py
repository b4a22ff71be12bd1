"""Static batching: gather requests for a while, run them to the end, then the next batch."""

from __future__ import annotations

from services.compute.scheduler.policy import BatchView, Quota


class StaticBatch:
    """Nobody joins a batch that runs. It closes when it is full, or `window_s` after its first
    request was seen."""

    __slots__ = ("_full_at", "_gathering_since_s", "_wake_at_s", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._gathering_since_s: float | None = None
        self._wake_at_s: float | None = None
        self._full_at = 0  # the count of started sequences at which the batch is complete

    def quotas(self, view: BatchView, now_s: float) -> tuple[Quota, ...]:
        """Mixed steps for the batch that runs; nothing while the next one gathers."""
        self._wake_at_s = None
        missing = max(self._full_at - view.num_started_total, 0)
        if view.num_new <= missing:
            self._gathering_since_s = None
        elif self._gathering_since_s is None:
            self._gathering_since_s = now_s
        under_way = view.num_running or view.num_resumable or (missing and view.num_new)
        if not under_way:
            missing = self._close(view, now_s)
            if not missing:
                return ()
        return (Quota(True, view.max_prefill_tokens, missing),)

    def wake_at_s(self) -> float | None:
        """When the batch that gathers closes."""
        return self._wake_at_s

    def _close(self, view: BatchView, now_s: float) -> int:
        """Close the batch if it is time to; return how many are in it."""
        since_s = self._gathering_since_s
        self._full_at = view.num_started_total
        if since_s is None:
            return 0
        if view.num_new < view.max_num_seqs and now_s < since_s + self._window_s:
            self._wake_at_s = since_s + self._window_s
            return 0
        size = min(view.num_new, view.max_num_seqs)
        self._full_at += size
        self._gathering_since_s = None
        return size
