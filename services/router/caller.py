"""Who asks, and how long the answer may take; pure, given the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from common.messages.failure import Failure
from services.router.admission import Client

TIMED_OUT = Failure(408, "timeout", "the request took longer than the timeout it asked for")
WAITED = Failure(
    503,
    "overloaded",
    "there was no first token within the time that this server lets a request wait (max_wait_s); "
    "try again later",
    None,
    True,
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of one request, which has to begin and to end by certain times.

    Its prompts have about `num_tokens`.
    """

    client: Client
    num_tokens: int = 0
    begin_by_s: float = math.inf
    end_by_s: float = math.inf
    has_begun: bool = False  # it has an earlier part of its answer

    def spent(self, now_s: float, has_begun: bool) -> Failure | None:
        """Why a request ends now, if its time is up; it `has_begun` with its first token."""
        if now_s >= self.end_by_s:
            return TIMED_OUT
        has_begun = has_begun or self.has_begun
        return WAITED if now_s >= self.begin_by_s and not has_begun else None

    def after_begin(self) -> Caller:
        """The same caller, who has something of the answer."""
        return replace(self, has_begun=True)


ANYBODY = Caller(Client(""))
