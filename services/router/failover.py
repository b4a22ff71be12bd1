"""Which choices may be tried again after their attempt ended: pure, given the clock.

It knows neither workers nor messages; the fleet says where a choice can go.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from common.messages.failure import Failure

# Two are a bad day, or a request that kills what computes it: the third replica is not to find out.
MAX_COMPUTE_DEATHS = 2
MAX_DEATHS = 4  # of any of its workers
MAX_TRIES = 8  # without a new token: that many refusals or losses in a row are no coincidence

# What a worker of two leaves behind at 400 streams goes on at once; more of it spreads over seconds
# rather than stop what runs elsewhere with prompts.
RETRIES_PER_S = 100.0
RETRY_BURST = 200.0

POISON = Failure(500, "workers_died", "workers died while they worked on this request")


@dataclass(frozen=True, slots=True)
class Setback:
    """Why an attempt ended: what its client would be told, and at which workers it happened.

    `refused_by` is the instance that did not take it, `died_at` the service whose worker is gone.
    The pages of an attempt that was not ended by compute are still at `kept_compute`, an instance.
    """

    failure: Failure
    refused_by: str = ""
    died_at: str = ""
    kept_compute: str = ""


@dataclass(slots=True)
class Setbacks:
    """What befell one choice; refusals and tries count since its last new token."""

    failure: Failure | None = None  # of the last attempt
    refused_by: set[str] = field(default_factory=set)
    kept_compute: str = ""
    num_tokens: int = 0
    num_tries: int = 0
    num_deaths: int = 0
    num_compute_deaths: int = 0

    def add(self, setback: Setback, num_tokens: int) -> Failure | None:
        """Note one with so many tokens accepted; return the failure if it was one too many."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.num_tries = num_tokens, 0
            self.refused_by = set()
        self.num_tries += 1
        self.num_deaths += bool(setback.died_at)
        self.num_compute_deaths += setback.died_at == "compute"
        self.failure = setback.failure
        self.kept_compute = setback.kept_compute
        if setback.refused_by:
            self.refused_by.add(setback.refused_by)
        if self.num_compute_deaths >= MAX_COMPUTE_DEATHS or self.num_deaths >= MAX_DEATHS:
            return POISON
        return setback.failure if self.num_tries >= MAX_TRIES else None

    @property
    def is_overload(self) -> bool:
        """Whether it has only just begun and was refused for want of room."""
        overloaded = self.failure is not None and self.failure.code == "overloaded"
        return overloaded and not self.num_tokens


class RetryBudget:
    """A token bucket: so many retries a second, and so many at once after a while without any."""

    def __init__(self, per_s: float = RETRIES_PER_S, burst: float = RETRY_BURST) -> None:
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._filled_at_s = 0.0

    def take(self, now_s: float) -> bool:
        """Take one retry, if there is one."""
        elapsed_s = max(0.0, now_s - self._filled_at_s)
        self._level = min(self._burst, self._level + elapsed_s * self._per_s)
        self._filled_at_s = now_s
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True


def may_wait(setbacks: Setbacks, waited_s: float, hold_s: float, missing: Collection[str]) -> bool:
    """Whether a choice that no worker can take now is held.

    `missing` are the services without any worker. Without one missing, all that are there have
    refused it: what a full house refuses before its first token is told so at once.
    """
    if setbacks.is_overload and not missing:
        return False
    return waited_s < hold_s
