"""Requests, their choices and the attempts at each: what the in-flight table holds."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from common.messages.address import Route
from common.messages.arrays import int32s
from common.messages.control import AbortReason, ModelCard
from common.messages.failure import Failure
from common.messages.logprobs import PromptLogprobs
from common.messages.text import TextOpened
from common.messages.tokenize import Tokenize
from services.router.answer import Sink
from services.router.caller import ANYBODY, Caller
from services.router.drain_rate import DrainRate
from services.router.failover import Setbacks
from services.router.generate_request import expected_tokens
from services.router.request_stats import RequestStats

NEVER = -1.0
IN_TRANSIT_S = 0.5  # a heartbeat's interval

LOST = Failure(
    503, "stream_lost", "part of the answer was lost on its route; try again", None, True
)
WORKER_LOST = Failure(
    503, "worker_lost", "the server working on this request is gone; try again", None, True
)
MOVED = Failure(
    503, "worker_draining", "the server working on this request is stopping; try again", None, True
)
ABORTED = Failure(  # by a stage that took this router, or the stage after it, for gone
    503, "aborted", "the request was ended by the server; try again", None, True
)
FAILED = Failure(500, "internal_error", "the request failed in the server")


@dataclass(eq=False, slots=True)
class InflightRequest:
    """One request: its sink and its choices, `num_open` of which have not ended.

    Every attempt at a choice of prompt p goes to workers of the revision of `card`, with
    `messages[p]` as its `Tokenize`, but for what is the attempt's own.
    """

    sink: Sink
    num_open: int
    stats: RequestStats
    admitted_at_s: float
    card: ModelCard
    wants_ids: bool = False
    caller: Caller = ANYBODY
    starts: DrainRate = field(default_factory=DrainRate)  # is told of first tokens
    choices: list[Choice] = field(default_factory=list)
    messages: list[Tokenize] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Whether any of its choices has a token, or has ended, as embeddings do one by one."""
        is_one_over = self.num_open < len(self.choices)
        return is_one_over or any(choice.token_ids for choice in self.choices)

    def spent(self, now_s: float) -> Failure | None:
        """Why it ends now, if its time is up."""
        if now_s < self.caller.begin_by_s and now_s < self.caller.end_by_s:
            return None
        return self.caller.spent(now_s, self.has_begun)


@dataclass(eq=False, slots=True)
class Choice:
    """One answer in progress, with the journal of what was accepted of it: ids and characters.

    It has one attempt at a time. Without one it waits to be tried again.
    """

    request: InflightRequest
    index: int
    attempt: Attempt | None = None
    token_ids: array[int] = field(default_factory=int32s)
    num_characters: int = 0
    first_token_at_s: float = 0.0
    token_at_s: float = 0.0  # when its last token arrived; 0.0 before the first one
    opened: TextOpened | None = None  # what the sink has of the prompt's token counts
    next_scored: int = 1  # position in the prompt
    setbacks: Setbacks = field(default_factory=Setbacks)

    @property
    def message(self) -> Tokenize:
        """What its attempts have in common."""
        messages = self.request.messages
        return messages[self.index // messages[0].num_choices]

    @property
    def expected_tokens(self) -> int:
        """How long its prompt and answer will be together, as far as is known."""
        message = self.message
        most = max(message.sampling.max_tokens, len(self.token_ids) + 1)
        known = self.opened.prompt_tokens if self.opened else self.setbacks.prompt_tokens
        return known + most if known else expected_tokens(message.prompt, most)

    def previous_token(self, now_s: float) -> float:
        """Note that a token has come; returns when the one before it did, or `NEVER`."""
        previous_s, self.token_at_s = self.token_at_s, now_s
        if previous_s:
            return previous_s
        self.first_token_at_s = now_s
        self.request.starts.left(now_s)
        queued_s = self.opened.queued_s if self.opened else None
        self.request.stats.add_first_token(now_s - self.request.admitted_at_s, queued_s)
        return NEVER

    def lacks_scores(self, prompt_tokens: int) -> bool:
        """Whether logprobs of its prompt, which compute sends for the first choice, are missing."""
        message = self.message
        if message.sampling.num_prompt_logprobs < 0 or message.pooling:
            return False
        return not self.index % message.num_choices and self.next_scored < prompt_tokens

    def score(self, scored: PromptLogprobs) -> None:
        """Hand on what is new of a prompt's logprobs; a retry begins anew and may cut elsewhere."""
        num_known, count = self.next_scored - scored.first, len(scored.logprobs)
        if num_known >= count:
            return
        if num_known:
            _, rest = scored.logprobs.split((num_known, count - num_known))
            scored = PromptLogprobs(scored.row, self.next_scored, rest)
        self.next_scored += count - num_known
        self.request.sink.scored(self.index, scored)


@dataclass(eq=False, slots=True)
class Attempt:
    """One try at a choice: its route, and the output index of its next row."""

    counter: int
    choice: Choice
    route: Route
    next_index: int
    seen_at_s: float  # admitted, or last listed by its tokenizer or compute
    left_at_s: float = 0.0  # since when neither lists it, as far as is known
    past_tokenizer: bool = False  # compute has it, as a row or a heartbeat said

    def needs(self, instance_id: str) -> bool:
        """Whether a worker is still involved; the tokenizer only until compute has the attempt."""
        route = self.route
        if instance_id in (route.compute.instance_id, route.detokenizer.instance_id):
            return True
        return route.tokenizer.instance_id == instance_id and not self.past_tokenizer

    def is_missing(self, beaten_since_s: Callable[[str], float], now_s: float) -> bool:
        """Whether no stage has it any more, as `InflightTable.lose_missing` explains."""
        route, seen_at_s = self.route, self.seen_at_s + IN_TRANSIT_S
        for stage in (route.tokenizer, route.compute):
            if beaten_since_s(stage.instance_id) <= seen_at_s:
                return False
        if not self.left_at_s:
            self.left_at_s = now_s
        return beaten_since_s(route.detokenizer.instance_id) > self.left_at_s


@dataclass(frozen=True, slots=True)
class AbortedAttempt:
    """An attempt that has left the table while stages may still work on it."""

    counter: int
    route: Route
    reason: AbortReason
    past_tokenizer: bool
