"""One sequence: a prompt and what was generated after it; and the rows of a step made of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple

import numpy as np

from common.messages.address import AttemptId
from common.messages.failure import Ending, Usage
from common.messages.generate import Generate
from services.compute.kv.page_table import PageTable, PageTables
from services.compute.kv.prefix_tree import Node
from services.compute.shares import ClientShare
from services.compute.speculative.past_answers import PastAnswers, Tenant
from services.compute.step import NO_DRAFTS, NO_IDS, Int32Array, SlotDelta, StepPlan


class Status(Enum):
    """Where a sequence is.

    A parked one waits for its leader's prompt pages. A swapped one has its pages on the host; while
    it is loading they are on their way back, and it keeps a slot.
    """

    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    SWAPPED = "swapped"
    LOADING = "loading"
    ENDED = "ended"


OUTPUT_WEIGHT = 2
"""What a generated token counts for its client where a prompt's counts one."""


class SequenceParams:
    """What does not change over a sequence's life, shared by all choices of a request."""

    def __init__(
        self,
        request: Generate,
        eos_token_ids: tuple[int, ...],
        pooling: str = "",
        arrived_at_s: float = 0.0,
        share: ClientShare | None = None,
        max_drafts: tuple[int, int] = (0, 0),
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.share = share or ClientShare("")
        self.goes_on = bool(request.output_ids)  # another worker had begun it
        self.begun = self.goes_on  # a client may read one of its choices
        self.arrived_at_s = arrived_at_s
        # The bytes name pages in the prefix tree; `prompt_T` is the same memory.
        self.prompt = request.prompt_ids
        self.prompt_T: Int32Array = np.frombuffer(self.prompt, dtype=np.int32)
        self.sampling = sampling
        self.detokenizer = request.detokenizer
        self.header = request.header
        self.num_logprobs = sampling.num_logprobs
        self.pools = request.pooling
        self.pools_all = request.pooling and pooling != "last"  # of every position, in one slot
        self.structured = sampling.grammar_spec is not None
        self.nonfinite = False  # a choice of it has had logits that were
        # Of a row, and the positions behind it that get pages.
        self.max_drafts, self.max_ahead = (0, 0) if request.pooling else max_drafts
        self.guesses = self.max_drafts > 0 and not self.structured  # some of a grammar are forced
        self._prediction_T = NO_IDS
        self._num_spare = 0
        # A grammar's end is the answer's; until there its masks hold back what is to be ignored.
        has_grammar = sampling.grammar_spec is not None and bool(sampling.grammar_spec.grammar)
        self.eos_token_ids = () if sampling.ignore_eos and not has_grammar else eos_token_ids
        self.stop_ids = frozenset((*self.eos_token_ids, *sampling.stop_token_ids))

    @property
    def is_predicted(self) -> bool:
        """Whether the client predicts the answer."""
        return bool(self.request.prediction_ids)

    @property
    def tenant(self) -> Tenant:
        return Tenant(self.request.client, self.request.cache_salt)

    def predict(self, past_answers: PastAnswers | None, max_model_len: int) -> None:
        """Take of the client's prediction, or of past answers that may come again, what there is
        room for behind the prompt."""
        if not self.guesses:
            return
        predicted_T: Int32Array = np.frombuffer(self.request.prediction_ids, dtype=np.int32)
        if not self.is_predicted and past_answers is not None:
            predicted_T = past_answers.likely(self.tenant, self.prompt_T)
        room = max(max_model_len - len(self.prompt_T), 0)
        self._prediction_T = predicted_T[:room]
        self._num_spare = room - len(self._prediction_T)

    def prediction_behind(self, num_outputs: int) -> Int32Array:
        """The prediction without what an answer of so many tokens has grown over: it stands at the
        end of the slot's room for tokens."""
        return self._prediction_T[max(num_outputs - self._num_spare, 0) :]


class Sequence:
    """One attempt. Three counts of positions say where it stands.

    `num_tokens`: tokens whose ids the host has. `num_scheduled_tokens`: positions that are on the
    device or on their way, if all drafts among them are right, of which `num_drafts` are without a
    result. `num_computed_tokens`: positions whose step has a result. The step that reaches the end
    of what is known samples; from then on the next input is on the device.
    """

    __slots__ = (
        *("attempt", "cached_tokens", "charged", "check_at", "choice", "epoch", "followers"),
        *("has_run", "share"),
        *("host_pages", "leader", "live", "num_computed_tokens", "num_scheduled_tokens"),
        *("num_accepted", "num_drafts", "num_offered", "num_scored", "opened", "order", "outputs"),
        *("page_tokens", "params", "prompt_len"),
        *("queued_s", "replan_at", "slot", "status", "stop_ids", "swap_step", "table"),
        *("token_limit", "transfer", "wants_scores"),
    )

    def __init__(
        self,
        attempt: AttemptId,
        params: SequenceParams,
        choice: int,
        arrival: int,
        table: PageTable | PageTables,
    ) -> None:
        self.attempt = attempt
        self.params = params
        self.share = params.share
        # Packed, a page is one copy; in a list each integer is a cache miss (2.4 us, not 0.3).
        self.outputs = array("i", params.request.output_ids.tobytes())
        # Computed tokens that its client's counter has, here or where they were lost.
        self.charged = len(params.prompt_T) + len(self.outputs) if params.goes_on else 0
        self.choice = choice
        self.table = table
        self.page_tokens = table.page_tokens
        self.order = (params.request.priority, arrival)
        self.prompt_len = len(params.prompt_T)
        self.token_limit = self.prompt_len + params.sampling.max_tokens
        self.stop_ids = params.stop_ids  # read for every token: one attribute less on the way

        self.status = Status.WAITING
        self.live = True
        self.has_run = False
        self.opened = False  # an output of it has been handed on
        self.cached_tokens = 0
        self.queued_s: float | None = None  # from its arrival until it first ran
        self.wants_scores = (
            params.sampling.num_prompt_logprobs >= 0 and choice == 0 and not params.pools
        )
        self.num_scored = 0  # positions of the prompt whose scores have been handed on
        self.num_scheduled_tokens = 0
        self.num_computed_tokens = 0
        self.num_drafts = 0
        self.num_offered = 0  # drafts that have a result
        self.num_accepted = 0  # of them, those that are among the outputs
        self.slot = -1
        self.epoch = 0
        self.replan_at = 0  # scheduled tokens at which the planner has to do more than the next row
        self.check_at = len(self.outputs) + 1  # outputs at which commit does more than append
        self.host_pages = array("i")
        self.swap_step = -1  # the first step after it was swapped out last
        self.transfer = -1  # the one that it waits for while it is loading
        self.leader: Sequence | None = None  # the choice whose prompt pages this one waits for
        self.followers: list[Sequence] = []

    def charge(self) -> None:
        """Count for its client what has been computed since the last call; once is enough."""
        done, charged = self.num_computed_tokens, self.charged
        if done > charged:
            self.charged = done
            new_outputs = max(done - max(charged, self.prompt_len), 0)
            self.share.tokens += done - charged + (OUTPUT_WEIGHT - 1) * new_outputs

    def precedes(self, other: Sequence) -> bool:
        """Whether its client's turn comes before another client's."""
        if self.share is other.share:
            return False
        return (self.order[0], self.turn) < (other.order[0], other.turn)

    @property
    def turn(self) -> tuple[bool, int, int]:
        """The lowest goes first: what another worker has begun, then the client that had least."""
        return not self.params.goes_on, self.share.tokens, self.share.num_running

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + len(self.outputs)

    @property
    def last_id(self) -> int:
        return self.outputs[-1] if self.outputs else int(self.params.prompt_T[-1])

    @property
    def in_flight(self) -> bool:
        return self.num_scheduled_tokens != self.num_computed_tokens

    @property
    def num_reusable(self) -> int:
        """Positions that need not be computed where their pages are known."""
        if self.params.pools_all:  # a sum needs every hidden state
            return 0
        return self.num_scored if self.has_to_score(0) else self.num_tokens - 1

    @property
    def can_swap(self) -> bool:
        return not self.params.pools_all

    def has_to_score(self, start: int) -> bool:
        """Whether positions from `start` on have scores to report: the prompt's last has none."""
        return self.wants_scores and max(start, self.num_scored) < self.prompt_len - 1

    @property
    def is_fully_scheduled(self) -> bool:
        return self.num_scheduled_tokens >= self.token_limit - 1

    @property
    def next_position(self) -> int:
        """At or before every position that is computed next."""
        return self.num_scheduled_tokens - self.num_drafts

    @property
    def num_sendable(self) -> int:
        """Positions whose pages the device is told of: of a prompt those that are scheduled."""
        num_scheduled = self.num_scheduled_tokens
        return self.table.room if num_scheduled >= self.num_tokens - 1 else num_scheduled

    @property
    def num_draftable(self) -> int:
        """How many drafts the next row may have: they need pages, and a token that is wanted."""
        end = min(self.table.room, self.token_limit - 1)
        return min(self.params.max_drafts, end - self.num_scheduled_tokens - 1)

    def set_replan(self) -> None:
        """Let the planner look again when the pages or the tokens come to an end."""
        room, end = self.table.room, self.token_limit - 1
        self.replan_at = end if room >= end else room - self.params.max_ahead

    def reject(self, num_drafts: int, num_accepted: int) -> None:
        """A step has a result: so many of its drafts were right, the others were not computed."""
        self.num_drafts -= num_drafts
        self.num_scheduled_tokens -= num_drafts - num_accepted

    def set_check(self) -> None:
        """Let commit check tokens with logprobs, those that fill a page, and the last one."""
        num_outputs = len(self.outputs)
        if self.params.num_logprobs >= 0:
            self.check_at = num_outputs + 1
            return
        # Of n known tokens n - 1 are computed: a page is full one token after its last one came.
        page_tokens, prompt_len = self.page_tokens, self.prompt_len
        num_computed = prompt_len + num_outputs - 1
        next_boundary = num_computed - num_computed % page_tokens + page_tokens
        self.check_at = min(next_boundary + 1 - prompt_len, self.params.sampling.max_tokens)

    def reschedule(self) -> None:
        """The last scheduled position draws nothing after all, and is scheduled again.

        All samples before it must have results, so that its input is known.
        """
        if self.num_scheduled_tokens != self.num_tokens:
            raise RuntimeError(f"{self.attempt} has samples without results")
        self.num_scheduled_tokens -= 1

    def restart(self, num_computed_tokens: int) -> None:
        self.num_scheduled_tokens = num_computed_tokens
        self.num_computed_tokens = num_computed_tokens
        self.num_drafts = 0

    def page_keys(self, first: int, last: int) -> Iterable[bytes]:
        # A prompt may have thousands: sliced here they take half the time of as many calls.
        prompt, key_bytes = self.params.prompt, 4 * self.page_tokens
        num_packed = min(last, self.prompt_len // self.page_tokens)
        if first >= num_packed:
            return map(self.page_key, range(first, last))
        starts = range(first * key_bytes, num_packed * key_bytes, key_bytes)
        sliced = (prompt[start : start + key_bytes] for start in starts)
        return chain(sliced, map(self.page_key, range(num_packed, last)))

    def page_key(self, index: int) -> bytes:
        page_tokens = self.page_tokens
        start, stop = index * page_tokens, (index + 1) * page_tokens
        prompt = self.params.prompt
        if stop <= self.prompt_len:
            return prompt[4 * start : 4 * stop]
        outputs = self._outputs(start, stop)
        return prompt[4 * start :] + outputs if start < self.prompt_len else outputs

    def ids_T(self, start: int, stop: int) -> Int32Array:
        ids_T = self.params.prompt_T[start:stop]
        if stop <= self.prompt_len:
            return ids_T
        return np.concatenate((ids_T, np.frombuffer(self._outputs(start, stop), dtype=np.int32)))

    def _outputs(self, start: int, stop: int) -> bytes:
        first = max(start - self.prompt_len, 0)
        return self.outputs[first : stop - self.prompt_len].tobytes()

    def slot_delta(self) -> SlotDelta:
        sampling = self.params.sampling
        repetition = sampling.repetition_penalty != 1.0
        counted = repetition or sampling.presence_penalty or sampling.frequency_penalty
        drafts = self.params.guesses
        has_outputs = counted or self.params.structured or drafts
        return SlotDelta(
            slot=self.slot,
            epoch=self.epoch,
            sampling=sampling,
            choice=self.choice,
            stop_ids=tuple(self.stop_ids),
            drafts=drafts,
            prompt_ids=self.params.prompt_T if repetition or drafts else NO_IDS,
            # A copy: an array with a view of it cannot grow.
            output_ids=np.array(self.outputs, dtype=np.int32) if has_outputs else NO_IDS,
            prediction_ids=self.params.prediction_behind(len(self.outputs)),
        )

    def ending(self) -> Ending | None:
        """How the sequence ends with the last of its outputs, if it does."""
        if self.params.pools:
            return None
        sampling = self.params.sampling
        last = self.outputs[-1] if self.outputs else -1
        if last in self.stop_ids:  # the runner masks these below `min_tokens`
            return Ending("stop", self.usage(), None if last in self.params.eos_token_ids else last)
        if len(self.outputs) >= sampling.max_tokens:
            return Ending("length", self.usage())
        return None

    @property
    def drafted(self) -> tuple[int, int]:
        """How many of the drafts that were computed are among the outputs, and how many not."""
        return self.num_accepted, self.num_offered - self.num_accepted

    def usage(self) -> Usage:
        return Usage(self.prompt_len, self.cached_tokens, len(self.outputs), *self.drafted)


class Chunk(NamedTuple):
    """Known tokens of a sequence; `samples` when they reach the last one and more are wanted."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool


@dataclass(slots=True, eq=False)
class Draft:
    """What the next step computes."""

    decodes: list[Sequence] = field(default_factory=list)  # may be shared: never change it
    num_drafts: Int32Array = field(default_factory=lambda: NO_IDS)  # of `decodes`; empty: none
    given_drafts: Int32Array = field(default_factory=lambda: NO_DRAFTS)  # as a plan's
    chunks: list[Chunk] = field(default_factory=list)
    num_scored: int = 0  # tokens of rows whose prompts are scored
    # Pages that the chunks fill and that are in the prefix tree already.
    published: list[tuple[Sequence, Node]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A plan that is with the runner: sample s of its result belongs to `samples[s]`.

    Samples in `skipped` draw nothing: their sequences were rescheduled. `published` are the pages
    that entered the prefix tree on the step's account, before it had a result.
    """

    plan: StepPlan
    samples: list[Sequence]
    chunks: list[Chunk]
    published: list[tuple[Sequence, Node]]
    skipped: frozenset[int] = frozenset()

    def slot_S(self) -> Int32Array:
        slot_R, row_S = self.plan.row_slot, self.plan.sample_row
        return slot_R if len(row_S) == len(slot_R) else slot_R[row_S]

    def sequences(self) -> list[Sequence]:
        """Every sequence that has a row in the step, once."""
        prefilling = (chunk.sequence for chunk in self.chunks if not chunk.samples)
        return [*self.samples, *prefilling]
