"""Messages that any stage may get: aborts, and the heartbeat that is also the registration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from common.messages.address import Address, AttemptId
from common.messages.arrays import Int64s
from common.messages.experts import ExpertLoad

ServiceName: TypeAlias = Literal["tokenizer", "compute", "detokenizer"]
AbortReason: TypeAlias = Literal["client_gone", "stop_string", "lost", "unknown", "superseded"]


@dataclass(frozen=True, slots=True)
class Abort:
    """End this attempt; idempotent, and valid also before the attempt has arrived."""

    TAG: ClassVar[str] = "abort"
    attempt: AttemptId
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class OtherProtocol:
    """What an inbox delivers in place of a message whose protocol version it does not read."""

    version: int
    tag: str


@dataclass(frozen=True, slots=True)
class Matryoshka:
    """The lengths to which an embedding may be cut: any, or those of `sizes`.

    With `normalize`, a cut embedding is scaled to the norm 1, as the model's own have.
    """

    sizes: tuple[int, ...] = ()
    normalize: bool = False


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model that a worker serves; a route stays within one revision.

    Answers name it `name`; requests may also use one of its `aliases`. Tokenizers and detokenizers
    serve every model with their `vocabulary`, where that is known, and else their own revision.
    While it is `loading`, compute takes nothing yet.
    Lengths are 0 where the worker does not decide them (tokenizer and detokenizer).
    `sampling_defaults` are the model's own values of fields of `SamplingParams` that a client
    leaves out; only compute sends them. `pooling` is how compute makes an embedding of a text,
    empty for a model without embeddings; with `matryoshka` they may be cut.
    """

    name: str
    revision: str
    vocab_size: int
    max_model_len: int = 0
    max_input_length: int = 0
    max_output_length: int = 0
    sampling_defaults: tuple[tuple[str, float], ...] = ()
    pooling: str = ""
    aliases: tuple[str, ...] = ()
    matryoshka: Matryoshka | None = None
    vocabulary: str = ""
    loading: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use."""
        return (self.name, *self.aliases)

    def reads(self, other: ModelCard) -> bool:
        """Whether a tokenizer or detokenizer with this card can serve another model."""
        if self.vocabulary and other.vocabulary:
            return self.vocabulary == other.vocabulary
        return (self.name, self.revision) == (other.name, other.revision)


@dataclass(frozen=True, slots=True)
class DraftReport:
    """Drafts of one drafter since compute's start: rows that had any, and drafts of them.

    `accepted[k]` counts the rows of which draft k, and so all before it, was right.
    """

    drafter: str
    num_rows: int
    num_drafts: int
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a compute's steps took: counts since its start, times over its last thousand steps.

    `times` has (name, median, 99th percentile) in seconds for the host's `plan`, `launch`, `wait`,
    `commit` and `send`, for `host`, its whole cycle less what it waited, and for `device`.
    `device_idle_ratio` is the share of the device's time that went by between two steps while
    there was work. Times that the device does not report are left out.
    """

    num_steps: int
    num_prefill_tokens: int
    num_samples: int
    times: tuple[tuple[str, float, float], ...] = ()
    device_idle_ratio: float | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # that were computed beside the tokens before them
    num_accepted_tokens: int = 0  # of them, those that were right
    drafts: tuple[DraftReport, ...] = ()  # the same by drafter and place


@dataclass(frozen=True, slots=True)
class Signals:
    """What tells how many workers of a service are needed.

    `utilization` is the share in use, over some seconds, of what limits this one. `queue_age_s` is
    how long the oldest request that waits has waited, `num_waiting_tokens` what those that wait
    have to prefill. Compute's rates are the most that its steps allow, 0 until some were measured.
    `num_routers` are alive for this worker: they do not know of each other.
    """

    utilization: float
    queue_age_s: float = 0.0
    num_waiting_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    num_routers: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is: requests running and waiting against its capacity, KV in use (0..1)."""

    num_running: int
    num_waiting: int
    capacity: int
    kv_usage: float = 0.0
    steps: StepReport | None = None  # compute's
    signals: Signals | None = None


@dataclass(frozen=True, slots=True)
class WorkerAlive:
    """Worker to router, twice a second: registration, heartbeat and inventory in one.

    `progress` grows whenever work is done; a worker with open attempts whose progress stands
    still for longer than `stall_after_s` counts as hung. `open_counters` are this router's
    attempts that the worker has state for. `caught_up` says that no message
    waited to be read: only then is an attempt that `open_counters` lacks really not there.
    `experts` are in a few heartbeats only, of a compute whose model has any.
    """

    TAG: ClassVar[str] = "worker_alive"
    LINGERS: ClassVar[bool] = False  # not worth waiting for at the end of its sender
    service: ServiceName
    address: Address
    model: ModelCard
    load: Load
    beat: int
    progress: int
    stall_after_s: float
    draining: bool
    open_counters: Int64s
    caught_up: bool = True
    trouble: str = ""
    experts: ExpertLoad | None = None


@dataclass(frozen=True, slots=True)
class RouterAlive:
    """Router to worker: the answer to a heartbeat, which renews the router's lease there.

    `num_open` tells a draining worker how many of this router's attempts are there or on their way.
    `leaving` is the last message of a router that stops: all its attempts have ended.
    """

    TAG: ClassVar[str] = "router_alive"
    LINGERS: ClassVar[bool] = False
    router: Address
    beat: int
    num_open: int = 0
    leaving: bool = False
