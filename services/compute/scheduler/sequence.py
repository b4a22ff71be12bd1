"""One sequence: a prompt, what was generated after it, and how far the device has got with it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum
from itertools import chain

import numpy as np

from common.messages.address import Address, AttemptId
from common.messages.failure import Ending, Usage
from common.messages.sampling import SamplingParams
from services.compute.kv.table import PageTable
from services.compute.scheduler.protocol import Request
from services.compute.step import NO_IDS, Int32Array, SlotDelta


class Status(Enum):
    """Where a sequence is. A parked one waits for its leader's prompt pages."""

    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    SWAPPED = "swapped"
    ENDED = "ended"


class SequenceParams:
    """What does not change over a sequence's life, shared by all choices of a request."""

    __slots__ = (
        "detokenizer",
        "eos_token_ids",
        "guided",
        "header",
        "num_logprobs",
        "pools",
        "pools_all",
        "priority",
        "prompt",
        "request",
        "sampling",
        "stop_ids",
    )

    def __init__(self, request: Request, eos_token_ids: tuple[int, ...], pooling: str = "") -> None:
        self.request = request
        self.prompt = request.prompt
        self.sampling: SamplingParams = request.sampling
        self.detokenizer: Address = request.detokenizer
        self.header: bytes = request.header
        self.priority = request.priority
        self.num_logprobs = request.sampling.num_logprobs
        self.pools = request.pooling
        self.pools_all = request.pooling and pooling != "last"  # of every position, in one slot
        guidance = request.sampling.guidance
        self.guided = guidance is not None
        # A grammar's end is the answer's; until there its masks hold back what is to be ignored.
        ignored = request.sampling.ignore_eos and not (guidance and guidance.grammar)
        self.eos_token_ids = () if ignored else eos_token_ids
        self.stop_ids = frozenset((*self.eos_token_ids, *request.sampling.stop_token_ids))


class Sequence:
    """One attempt. Three counts of positions say where it stands.

    `num_known`: tokens whose ids the host has. `launched`: positions that are on the device or on
    their way. `computed`: positions whose step has a result. The token after position p is
    sampled by the step that reaches the end of what is known, so `launched >= num_known` means
    that `launched - num_known + 1` samples are in flight, and the next input is on the device.
    """

    __slots__ = (
        "attempt",
        "cached_tokens",
        "choice",
        "computed",
        "epoch",
        "fence",
        "followers",
        "host_pages",
        "joined",
        "launched",
        "leader",
        "live",
        "notice",
        "num_scored",
        "opened",
        "order",
        "outputs",
        "page_tokens",
        "params",
        "prompt_len",
        "scores",
        "slot",
        "status",
        "stop_ids",
        "swap_step",
        "table",
        "token_limit",
    )

    def __init__(
        self,
        attempt: AttemptId,
        params: SequenceParams,
        output_ids: Int32Array,
        choice: int,
        arrival: int,
        table: PageTable,
    ) -> None:
        self.attempt = attempt
        self.params = params
        # Packed: a page's worth is one copy, where a list costs a cache miss for each of its
        # integers (2.4 us a page against 0.3).
        self.outputs = array("i", output_ids.tobytes())
        self.choice = choice
        self.table = table
        self.page_tokens = table.page_tokens
        self.order = (params.priority, arrival)
        self.prompt_len = len(params.prompt)
        self.token_limit = self.prompt_len + params.sampling.max_tokens
        self.stop_ids = params.stop_ids  # asked for every token: one attribute less on the way

        self.status = Status.WAITING
        self.live = True
        self.joined = False  # has run before, so it belongs to the batch that runs
        self.opened = False  # an event of it has been handed on
        self.cached_tokens = 0
        self.scores = params.sampling.num_prompt_logprobs >= 0 and choice == 0 and not params.pools
        self.num_scored = 0  # positions of the prompt that were told what comes after them
        self.launched = 0
        self.computed = 0
        self.slot = -1
        self.epoch = 0
        self.fence = 0  # `launched` at which the planner has to do more than the next row
        self.notice = len(output_ids) + 1  # outputs at which commit has to do more than append
        self.host_pages: list[int] = []
        self.swap_step = -1  # the step whose transfers fill `host_pages`
        self.leader: Sequence | None = None  # the choice whose prompt pages this one waits for
        self.followers: list[Sequence] = []

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host has."""
        return self.prompt_len + len(self.outputs)

    @property
    def last_id(self) -> int:
        """The last token whose id the host has."""
        return self.outputs[-1] if self.outputs else int(self.params.prompt.ids_T[-1])

    @property
    def in_flight(self) -> bool:
        """Whether a step without a result has a row of this sequence."""
        return self.launched != self.computed

    @property
    def num_reusable(self) -> int:
        """Positions that need not be computed where their pages are known.

        Scores and sums of hidden states come of computing.
        """
        if self.params.pools_all:
            return 0
        return self.num_scored if self.has_to_score(0) else self.num_known - 1

    @property
    def can_swap(self) -> bool:
        """Whether its pages are all that it has on the device."""
        return not self.params.pools_all

    def has_to_score(self, start: int) -> bool:
        """Whether positions from `start` on have scores to tell: the prompt's last has none."""
        return self.scores and max(start, self.num_scored) < self.prompt_len - 1

    @property
    def done_launching(self) -> bool:
        """Whether the last token that may be generated is known or on its way."""
        return self.launched >= self.token_limit - 1

    def set_fence(self) -> None:
        """Let the planner look again when the pages or the tokens come to an end."""
        self.fence = min(len(self.table.pages) * self.page_tokens, self.token_limit - 1)

    def set_notice(self) -> None:
        """Let commit look again at every token with logprobs, at a full page, at the last token."""
        num_outputs = len(self.outputs)
        if self.params.num_logprobs >= 0:
            self.notice = num_outputs + 1
            return
        # Of n known tokens n - 1 are computed: a page is full one token after its last one came.
        page_tokens, prompt_len = self.page_tokens, self.prompt_len
        num_computed = prompt_len + num_outputs - 1
        next_boundary = num_computed - num_computed % page_tokens + page_tokens
        self.notice = min(next_boundary + 1 - prompt_len, self.params.sampling.max_tokens)

    def take_back(self) -> None:
        """The last launched position draws nothing after all; it is to be launched again.

        Every draw before it must be known, so that its token is, too.
        """
        if self.launched != self.num_known:
            raise RuntimeError(f"{self.attempt} has draws that are not known")
        self.launched -= 1

    def restart(self, computed: int) -> None:
        """Go on from this many computed positions; nothing of the sequence is in flight."""
        self.launched = computed
        self.computed = computed

    def page_keys(self, first: int, last: int) -> Iterable[bytes]:
        """The keys of a range of full pages. A prompt may have thousands: those are sliced here,
        in half the time of as many calls."""
        packed, key_bytes = self.params.prompt.packed, 4 * self.page_tokens
        num_packed = min(last, self.prompt_len // self.page_tokens)
        if first >= num_packed:
            return map(self.page_key, range(first, last))
        starts = range(first * key_bytes, num_packed * key_bytes, key_bytes)
        sliced = (packed[start : start + key_bytes] for start in starts)
        return chain(sliced, map(self.page_key, range(num_packed, last)))

    def page_key(self, index: int) -> bytes:
        """The tokens of one full page, as the prefix tree names them."""
        page_tokens = self.page_tokens
        start, stop = index * page_tokens, (index + 1) * page_tokens
        packed = self.params.prompt.packed
        if stop <= self.prompt_len:
            return packed[4 * start : 4 * stop]
        outputs = self._outputs(start, stop)
        return packed[4 * start :] + outputs if start < self.prompt_len else outputs

    def ids_T(self, start: int, stop: int) -> Int32Array:
        """The known ids of these positions."""
        ids_T = self.params.prompt.ids_T[start:stop]
        if stop <= self.prompt_len:
            return ids_T
        return np.concatenate((ids_T, np.frombuffer(self._outputs(start, stop), dtype=np.int32)))

    def _outputs(self, start: int, stop: int) -> bytes:
        """The packed outputs among these positions."""
        first = max(start - self.prompt_len, 0)
        return self.outputs[first : stop - self.prompt_len].tobytes()

    def slot_delta(self) -> SlotDelta:
        """What the device has to know of the sequence in its new slot."""
        sampling = self.params.sampling
        repetition = sampling.repetition_penalty != 1.0
        counted = repetition or sampling.presence_penalty or sampling.frequency_penalty
        has_outputs = counted or self.params.guided
        return SlotDelta(
            slot=self.slot,
            epoch=self.epoch,
            sampling=sampling,
            choice=self.choice,
            stop_ids=tuple(self.stop_ids),
            prompt_ids=self.params.prompt.ids_T if repetition else NO_IDS,
            # A copy: who views an array keeps it from growing.
            output_ids=np.array(self.outputs, dtype=np.int32) if has_outputs else NO_IDS,
        )

    def ending(self) -> Ending | None:
        """How the sequence ends with the last of its outputs, if it does.

        The runner masks stop ids below `min_tokens`, so one that was sampled always counts.
        """
        if self.params.pools:
            return None
        sampling = self.params.sampling
        last = self.outputs[-1] if self.outputs else -1
        if last in self.stop_ids:
            return Ending("stop", self.usage(), None if last in self.params.eos_token_ids else last)
        if len(self.outputs) >= sampling.max_tokens:
            return Ending("length", self.usage())
        return None

    def usage(self) -> Usage:
        """Tokens used so far, counted from the request's start."""
        return Usage(self.prompt_len, self.cached_tokens, len(self.outputs))
