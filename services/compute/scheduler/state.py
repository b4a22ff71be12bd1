"""What the parts of the scheduler share: the running batch, open attempts, forks, how they end."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from pydantic import Field

from common.config import Settings
from common.messages.address import AttemptId
from common.messages.failure import Ending, EndReason, Failure
from common.messages.logprobs import PromptLogprobs
from common.messages.tokens import TokenLogprobs
from common.tombstones import Tombstones
from services.compute.kv.memory import KVMemory
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.outputs import Output, OutputRoutes, SequenceOutput
from services.compute.scheduler.sequence import Sequence, Status
from services.compute.scheduler.transfers import Transfers
from services.compute.scheduler.waiting import WaitingQueue
from services.compute.shares import ClientShare, Shares
from services.compute.speculative.past_answers import PastAnswers
from services.compute.step import MAX_SCORED_TOKENS, SlotDelta

by_order = attrgetter("order")


class SchedulerSettings(Settings):
    """Limits of one scheduler, resolved from the service's settings and the runner's spec."""

    max_num_seqs: int = Field(default=256, ge=1)  # sequences running at once
    max_waiting: int = Field(default=1024, ge=1)  # sequences queued before refusing
    max_prefill_tokens: int = Field(default=8192, ge=1)  # prompt tokens per step
    prefix_cache: bool = True  # share pages between requests; forks of one request always do
    # prompt tokens per step with logprobs
    max_scored_tokens: int = Field(default=MAX_SCORED_TOKENS, ge=1, le=MAX_SCORED_TOKENS)
    in_flight_steps: int = Field(default=1, ge=0)  # steps without a result when one is planned
    num_groups: int = Field(default=1, ge=1)  # that running sequences take turns in, in a pipeline
    forced_drafts: bool = True  # not where drafts are right by chance, to measure
    # To draft from; 0: none are kept. What shares no prefixes shares no answers either.
    past_answers_bytes: int = Field(default=0, ge=0)


def most_at_once(settings: SchedulerSettings, spec: RunnerSpec) -> int:
    """Positions that a sequence may have pages for beside those that its next query sees: of its
    largest chunk, or of drafts, those in flight and those of the next two steps."""
    drafts = (settings.in_flight_steps + 2) * spec.max_ahead
    return max(min(settings.max_prefill_tokens, spec.max_step_tokens), drafts + 1)


class OpenAttempts:
    """Sequences without a terminal, by router; tombstones of attempts aborted before they came."""

    def __init__(self) -> None:
        self.tombstones = Tombstones()
        self._by_router: dict[str, dict[int, Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_router)

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._by_router.values():
            yield from sequences.values()

    def get(self, attempt: AttemptId) -> Sequence | None:
        return self._by_router.get(attempt.router, {}).get(attempt.counter)

    def add(self, sequence: Sequence) -> None:
        attempt = sequence.attempt
        self._by_router.setdefault(attempt.router, {})[attempt.counter] = sequence

    def remove(self, sequence: Sequence) -> None:
        attempt = sequence.attempt
        sequences = self._by_router[attempt.router]
        del sequences[attempt.counter]
        if not sequences:
            del self._by_router[attempt.router]

    def counters(self, router: str) -> list[int]:
        return list(self._by_router.get(router, ()))


class Forks:
    """Choices of one request, of which only the first, the leader, computes the prompt.

    The others are parked until a plan has the end of the leader's prompt. Then they queue, perhaps
    for the same plan, find all full pages in the prefix tree and compute the partial last one.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self.num_parked = 0

    def park(self, leader: Sequence, followers: list[Sequence]) -> None:
        for follower in followers:
            follower.status = Status.PARKED
            follower.leader = leader
        leader.followers = followers
        self.num_parked += len(followers)

    def release(self, leader: Sequence) -> None:
        """The leader's prompt pages can be found: its followers queue."""
        for follower in leader.followers:
            self._queue(follower)
        leader.followers = []

    def leave(self, follower: Sequence) -> None:
        leader = follower.leader
        if leader is not None:
            leader.followers.remove(follower)
            follower.leader = None
            self.num_parked -= 1

    def succeed(self, leader: Sequence) -> None:
        """A leader ended too early: the first of its followers takes its place."""
        if not leader.followers:
            return
        successor, *rest = leader.followers
        leader.followers = []
        self._queue(successor)
        for follower in rest:
            follower.leader = successor
        successor.followers = rest

    def _queue(self, follower: Sequence) -> None:
        follower.leader = None
        follower.status = Status.WAITING
        self.num_parked -= 1
        self._waiting.add(follower)


class RunningBatch:
    """Sequences with a slot. Lists handed out are never changed afterwards, only replaced.

    A slot's epoch grows whenever a plan describes it, so that a row names its owner. The device
    does not know the slots of `new_owners`, nor all page-table entries of `dirty_tables`.
    """

    def __init__(self, num_slots: int) -> None:
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._epochs = [0] * num_slots
        self._decoding: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._stale = False
        self.routes = OutputRoutes(num_slots)
        self.sequences: dict[Sequence, None] = {}
        self.new_owners: list[Sequence] = []
        self.dirty_tables: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def decoding(self) -> list[Sequence]:
        """Those whose next step is one token, in the order of the device's rows."""
        if self._stale:
            self._settle()
        return self._decoding

    @property
    def prefilling(self) -> list[Sequence]:
        """Those with known tokens to compute before they can sample, first come first."""
        if self._stale:
            self._settle()
        return self._prefilling

    def load(self, sequence: Sequence) -> None:
        """Keep a slot for a sequence that enters when its pages are on the device."""
        if self._stale:
            self._settle()
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.LOADING
        sequence.share.num_running += 1
        self.sequences[sequence] = None

    def enter(self, sequence: Sequence) -> None:
        if sequence.slot < 0:
            self.load(sequence)
        elif self._stale:
            self._settle()
        sequence.status = Status.RUNNING
        sequence.has_run = sequence.params.begun = True
        self.routes.enter(sequence)
        prefilling = self._prefilling.copy()
        insort(prefilling, sequence, key=by_order)
        self._prefilling = prefilling
        self._describe(sequence)
        self.dirty_tables.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        del self.sequences[sequence]
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.share.num_running -= 1
        self._stale = True

    def begin_decoding(self, sequences: list[Sequence]) -> None:
        """All known tokens of these are scheduled: from now on they go token by token."""
        begun = set(sequences)
        self._prefilling = [s for s in self.prefilling if s not in begun]
        self._decoding = [*self._decoding, *sequences]

    def stop_decoding(self, sequences: set[Sequence]) -> None:
        """Plan no more rows for these, whose last token is on its way."""
        self._decoding = [s for s in self.decoding if s not in sequences]

    def youngest(self, share: ClientShare | None = None) -> Sequence:
        """The last one to arrive, of one client or of all."""
        sequences = (s for s in self.sequences if share is None or s.share is share)
        return max(sequences, key=by_order)

    def resend(self, missed: Iterable[SlotDelta]) -> None:
        """A plan may have been lost: send all page tables again, and its settings of slots."""
        known = [s for s in self.sequences if s.status is Status.RUNNING]
        for sequence in known:
            sequence.table.resend()
        self.dirty_tables = known
        epochs = {delta.slot: delta.epoch for delta in missed}
        for sequence in known:
            # One that is in flight has a row in a later step, so that its settings have come.
            if epochs.get(sequence.slot) == sequence.epoch and not sequence.in_flight:
                self._describe(sequence)

    def _describe(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._epochs[slot] += 1
        sequence.epoch = self._epochs[slot]
        self.new_owners.append(sequence)

    def _settle(self) -> None:
        self._stale = False
        decoding = [s for s in self._decoding if s.slot >= 0]
        if len(decoding) < len(self._decoding):  # the same list means: the same rows
            self._decoding = decoding
        self._prefilling = [s for s in self._prefilling if s.slot >= 0]


class SchedulerState:
    """Where every sequence is, what each part of the scheduler changes, and how sequences end."""

    def __init__(self, memory: KVMemory, settings: SchedulerSettings, num_slots: int) -> None:
        self.memory = memory
        self.attempts = OpenAttempts()
        self.shares = Shares()
        self.waiting = WaitingQueue()
        self.forks = Forks(self.waiting)
        self.running = RunningBatch(num_slots)
        self.transfers = Transfers(memory)
        self.outputs: list[Output] = []  # those of one attempt are in order
        self.past_answers: PastAnswers | None = None
        if settings.past_answers_bytes:
            self.past_answers = PastAnswers(settings.past_answers_bytes)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self.forks.num_parked

    def report(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        ending: Ending | None = None,
        scored: tuple[PromptLogprobs, ...] = (),
    ) -> None:
        """Report a sequence's last tokens, its end, or scores of its prompt."""
        params = sequence.params
        self.outputs.append(
            SequenceOutput(
                sequence.attempt,
                params.detokenizer,
                params.header,
                len(sequence.outputs) - len(token_ids),
                token_ids,
                params.num_logprobs,
                logprobs,
                not sequence.opened,
                ending,
                sequence.prompt_len,
                sequence.cached_tokens,
                scored,
                sequence.queued_s,
                sequence.drafted if sequence.num_offered else None,
            )
        )
        sequence.opened = True

    def end(self, sequence: Sequence, reason: EndReason, failure: Failure | None = None) -> None:
        """End a sequence, wherever it is, without a new token."""
        self.report(sequence, ending=Ending(reason, sequence.usage(), failure=failure))
        self.retire(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Give back slot, pages and place in the queue; the terminal is among the outputs.

        Pages are free at once, also those that a step in flight still writes to: one stream orders
        all writes, so the next owner's come later. Those that a transfer moves are leased until its
        end. What a step in flight samples is discarded by commit.
        """
        match sequence.status:
            case Status.RUNNING:
                self.running.leave(sequence)
            case Status.PARKED:
                self.forks.leave(sequence)
            case Status.WAITING:
                self.waiting.remove(sequence)
            case Status.SWAPPED:
                self.waiting.remove(sequence)
                self.drop_host_pages(sequence)
            case Status.LOADING:
                self.running.leave(sequence)
                self.drop_host_pages(sequence)
            case Status.ENDED:
                raise RuntimeError(f"{sequence.attempt} ends twice")
        self._remember(sequence)
        sequence.charge()
        sequence.share.num_open -= 1
        sequence.table.release()
        sequence.status = Status.ENDED
        sequence.live = False
        self.attempts.remove(sequence)
        self.forks.succeed(sequence)

    def _remember(self, sequence: Sequence) -> None:
        params = sequence.params
        if self.past_answers is not None and params.guesses:
            answer = sequence.outputs.tobytes()
            self.past_answers.remember(params.tenant, params.prompt_T, answer)

    def drop_host_pages(self, sequence: Sequence) -> None:
        for page in sequence.host_pages:
            self.memory.host.give_back(page)
        sequence.host_pages = array("i")
