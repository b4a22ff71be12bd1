"""Which choices may be tried again after their attempt ended: pure, given the clock.

It knows neither workers nor messages; the fleet says where a choice can go.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from common.messages.failure import Failure

# Two are a bad day, or a request that kills what computes it: the third replica is not to find out.
MAX_COMPUTE_DEATHS = 2
MAX_DEATHS = 4  # of any of its workers
FORGIVING_TOKENS = 64  # so many since the last death: what kills its workers does not get so far
MAX_TRIES = 8  # without a new token: that many refusals or losses in a row are no coincidence

# What a worker of two leaves behind at 400 streams goes on at once; more of it spreads over seconds
# rather than stop what runs elsewhere with prompts.
RETRIES_PER_S = 100.0
RETRY_BURST = 200.0
FULL_AGAIN_S = 0.5  # after which whoever had no room may be asked again; a heartbeat's interval

POISON = Failure(500, "workers_died", "workers died while they worked on this request")


@dataclass(frozen=True, slots=True)
class Setback:
    """Why an attempt ended: what its client would be told, and at which workers it happened.

    `refused_by` is the instance that did not take it, `died_at` the service whose worker is gone.
    The pages of an attempt that was not ended by compute are still at `kept_compute`, an instance.
    `lost_at` is the detokenizer on whose way part of the answer was lost, `wrong_at` the compute
    instance whose logits were not finite, which counts as a death.
    """

    failure: Failure
    refused_by: str = ""
    died_at: str = ""
    kept_compute: str = ""
    lost_at: str = ""
    wrong_at: str = ""


@dataclass(slots=True)
class Setbacks:
    """What befell one choice; refusals, losses and tries count since its last new token.

    It has waited since `waiting_since_s`, the first of refusals that follow each other.
    """

    failure: Failure | None = None  # of the last attempt
    at_s: float = 0.0  # of the last attempt's end
    waiting_since_s: float = 0.0
    refused_by: set[str] = field(default_factory=set)
    lost_at: set[str] = field(default_factory=set)
    wrong_at: set[str] = field(default_factory=set)
    kept_compute: str = ""
    prompt_tokens: int = 0  # of a prompt that was too long for a compute
    num_tokens: int = 0
    num_tries: int = 0
    num_deaths: int = 0
    num_compute_deaths: int = 0
    tokens_at_death: int = 0
    was_refused: bool = False

    def add(self, setback: Setback, num_tokens: int, now_s: float) -> Failure | None:
        """Note one with so many tokens accepted; return the failure if it was one too many."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.num_tries = num_tokens, 0
            self.refused_by, self.lost_at, self.was_refused = set(), set(), False
        self.num_tries += 1
        if setback.died_at:
            self._add_death(setback.died_at, num_tokens)
        if setback.wrong_at:
            self.wrong_at.add(setback.wrong_at)
        self.failure = setback.failure
        self.prompt_tokens = max(self.prompt_tokens, setback.failure.prompt_tokens)
        # What is lost twice is perhaps lost before it reaches a detokenizer.
        is_second_loss = bool(setback.lost_at and self.lost_at)
        self.kept_compute = "" if is_second_loss else setback.kept_compute
        if setback.lost_at:
            self.lost_at.add(setback.lost_at)
        self.at_s = now_s
        if not (setback.refused_by and self.was_refused):
            self.waiting_since_s = now_s
        self.was_refused = bool(setback.refused_by)
        if setback.refused_by:
            self.refused_by.add(setback.refused_by)
        if self.num_compute_deaths >= MAX_COMPUTE_DEATHS or self.num_deaths >= MAX_DEATHS:
            return replace(setback.failure, retryable=False) if setback.wrong_at else POISON
        return setback.failure if self.num_tries >= MAX_TRIES else None

    @property
    def avoided(self) -> set[str]:
        """The instances that are tried again only where there are no others."""
        return self.lost_at | self.wrong_at

    def forget_refusals(self, now_s: float) -> None:
        """Let those that refused it be asked again, if that was a while ago; call it as it waits.

        How long it waits bounds these rounds, so their tries do not count.
        """
        if now_s - self.at_s >= FULL_AGAIN_S:
            self.num_tries -= len(self.refused_by)
            self.refused_by = set()

    def _add_death(self, died_at: str, num_tokens: int) -> None:
        if num_tokens - self.tokens_at_death >= FORGIVING_TOKENS:
            self.num_deaths = self.num_compute_deaths = 0
        self.tokens_at_death = num_tokens
        self.num_deaths += 1
        self.num_compute_deaths += died_at == "compute"


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


def may_wait(
    setbacks: Setbacks, now_s: float, hold_s: float, missing: Collection[str], has_begun: bool
) -> bool:
    """Whether a choice that no worker can take now is held.

    `missing` are the services without any worker. Without one missing, all that are there have
    refused it: what a full house refuses is told so at once, unless its request `has_begun`.
    """
    is_overload = setbacks.failure is not None and setbacks.failure.code == "overloaded"
    if is_overload and not missing and not has_begun:
        return False
    return now_s - setbacks.waiting_since_s < hold_s
