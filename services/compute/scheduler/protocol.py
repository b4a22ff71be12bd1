"""The scheduler, seen from the engine: requests in, plans out, results in, events out."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from common.messages.address import Address, AttemptId
from common.messages.failure import Ending, EndReason, Failure
from common.messages.sampling import SamplingParams
from common.messages.tokens import PromptScores, TokenLogprobs
from services.compute.step import Int32Array, StepPlan, StepResult, int32_array


class Prompt:
    """The ids of a prompt, in the bytes in which they came, shared by all choices of a request.

    The bytes name pages in the prefix tree; `ids_T` is the same memory. Of 100,000 ids a tuple
    takes 2 ms to make, as long to look through, and 1.5 to pack again.
    """

    __slots__ = ("ids_T", "packed")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.ids_T: Int32Array = np.frombuffer(packed, dtype=np.int32)

    @classmethod
    def of(cls, ids: Sequence[int]) -> Prompt:
        """Pack ids."""
        return cls(int32_array(ids).tobytes())

    def __len__(self) -> int:
        return len(self.ids_T)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One `Generate`, as the scheduler takes it: `num_choices` sequences over one prompt.

    A lower `priority` goes first, as in vLLM.
    """

    attempt: AttemptId
    detokenizer: Address
    prompt: Prompt
    output_ids: Int32Array
    sampling: SamplingParams
    header: bytes
    num_choices: int = 1
    first_choice: int = 0
    priority: int = 0
    cache_salt: str = ""
    traceparent: str = ""
    pooling: bool = False


@dataclass(slots=True)
class SequenceEvent:
    """News of one sequence: tokens that are certain now, its end, or both. Treat it as frozen.

    Python makes a frozen one in 0.72 us, this one in 0.15 us.

    `opened` marks the first event of the attempt; there and with `ending` the header matters. What
    is told of one attempt never overlaps or leaves a gap: first_index continues where the news
    before ended (len(output_ids) at the start).
    """

    attempt: AttemptId
    detokenizer: Address
    header: bytes
    first_index: int
    token_ids: tuple[int, ...]
    num_logprobs: int = -1
    logprobs: tuple[TokenLogprobs, ...] = ()
    opened: bool = False
    ending: Ending | None = None
    prompt_tokens: int = 0  # with `opened`
    cached_tokens: int = 0  # with `opened`
    scored: tuple[PromptScores, ...] = ()


class StepTokens(NamedTuple):
    """News of sequences that merely go on: each has one more token, and that is all.

    In most steps those are most sequences, and at 256 of them an event for each costs 0.1 ms.
    Sequence s is attempt (`router`, counter_S[s]); its token is the output of number index_S[s].
    """

    detokenizer: Address
    router: str
    counter_S: npt.NDArray[np.int64]
    index_S: Int32Array
    token_S: Int32Array


News: TypeAlias = SequenceEvent | StepTokens


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts for heartbeats and metrics."""

    num_waiting: int
    num_running: int
    num_swapped: int
    num_slots: int  # most that can run
    pages_total: int
    pages_free: int  # never used or evictable at once
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int


class Scheduler(Protocol):
    """Continuous batching over paged KV: synchronous, pure, given the clock.

    The engine calls `plan` for step n+1 before `commit` of step n; a plan may be committed only in
    the order planned. News of aborts and refusals wait in the scheduler until `take_news`.
    """

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request; what can never run becomes a `refused` event."""
        ...

    def abort(self, attempt: AttemptId, now_s: float) -> bool:
        """End one attempt, known or not yet known; its pages are free before the next plan."""
        ...

    def plan(self, now_s: float) -> StepPlan | None:
        """Plan the next step, or None if nothing can run before a result is committed or added."""
        ...

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Take a step's result: advance sequences, end those that stopped, publish pages."""
        ...

    def live_samples(self, plan: StepPlan, samples: Iterable[int]) -> list[int]:
        """Those of a launched step's samples whose sequences have not ended meanwhile."""
        ...

    def defer(self, plan: StepPlan, samples: Iterable[int]) -> None:
        """Take back samples of the step planned last: they draw nothing and are planned again.

        All steps before it must be committed.
        """
        ...

    def fail_samples(self, plan: StepPlan, failures: Mapping[int, Failure]) -> None:
        """End the sequences of some samples of a launched step, each with its failure."""
        ...

    def fail_slots(self, slots: Container[int], failure: Failure) -> dict[AttemptId, str]:
        """End the owners of slots whose settings the device could not take, after `plan`.

        Their rows stay in the plan. Returns as `fail_step` does.
        """
        ...

    def fail_step(self, plan: StepPlan, failure: Failure, now_s: float) -> dict[AttemptId, str]:
        """The step broke: end every sequence that was in it with this failure.

        Returns the attempts that it ended, with the traceparent of each.
        """
        ...

    def wake_at_s(self) -> float | None:
        """When `plan` may find something to run though nothing has happened, if ever."""
        ...

    def take_news(self) -> list[News]:
        """Hand over the news since the last call; those of one attempt are in order."""
        ...

    def take_events(self) -> list[SequenceEvent]:
        """Hand over the same with an event for each sequence, to whoever has the time."""
        ...

    def end_all(self, matches: Callable[[Request], bool], reason: EndReason, now_s: float) -> None:
        """End every sequence of the requests that match, each with its one terminal event."""
        ...

    def is_open(self, attempt: AttemptId) -> bool:
        """Whether this attempt has state here."""
        ...

    def open_attempts(self, router: str) -> list[int]:
        """Counters of this router's attempts that have state here (waiting or running)."""
        ...

    def has_work(self) -> bool:
        """Whether any sequence is waiting, running or swapped."""
        ...

    def flush_prefix_cache(self) -> int:
        """Forget every shared page that no sequence holds; return how many there were."""
        ...

    def stats(self) -> SchedulerStats: ...
