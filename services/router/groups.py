"""The workers of each model: which can serve it together, and whether it is loaded; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from common.messages.address import Address
from common.messages.control import Load, ModelCard, ServiceName
from common.messages.experts import ExpertLoad
from services.router.errors import bad_field
from services.router.placement import PlacementCandidate
from services.router.step_pace import StepPace

SERVICES: tuple[ServiceName, ...] = get_args(ServiceName)
MAX_LENGTH = 1 << 31  # of a compute that names none
MAX_NAMED_MODELS = 8  # in an error message

Revision: TypeAlias = tuple[str, str]  # name and revision
ModelStatus: TypeAlias = Literal["loaded", "loading", "asleep", "incomplete"]


@dataclass(eq=False, slots=True)
class RegisteredWorker:
    """One instance of one worker and its last heartbeat."""

    service: ServiceName
    address: Address
    model: ModelCard
    load: Load
    draining: bool
    progress: int
    heard_at_s: float
    beat_at_s: float
    previous_beat_at_s: float = 0.0
    probed_at_s: float = 0.0
    num_open: int = 0  # of this router's attempts, as the worker's last heartbeat says
    num_placed: int = 0  # by this router since the last heartbeat
    trouble: str = ""  # why it should get no requests
    experts: ExpertLoad | None = None  # of the last heartbeat that had it
    unknown: frozenset[int] = frozenset()  # listed last time, not open here
    pace: StepPace = field(default_factory=StepPace)

    @property
    def name(self) -> str:
        return name_of(self.address)

    @property
    def accepts(self) -> bool:
        """Whether it takes requests: it is not on its way out, or in."""
        return not (self.draining or self.model.loading)

    @property
    def candidate(self) -> PlacementCandidate:
        """What placement may know of it."""
        load = self.load.num_running + self.load.num_waiting + self.num_placed
        step_s = self.pace.step_s(min(load + 1, max(1, self.load.capacity)))
        return PlacementCandidate(self.address.instance_id, load, self.load.capacity, step_s)


@dataclass(frozen=True, slots=True)
class Group:
    """The workers that a route for one model revision may lead through, by service.

    These are its computes, and every tokenizer and detokenizer of its vocabulary. The card is that
    of the compute with the longest context.
    """

    card: ModelCard
    workers: dict[ServiceName, tuple[RegisteredWorker, ...]] = field(
        default_factory=lambda: dict.fromkeys(SERVICES, ())
    )
    num_loading: int = 0  # computes that are still to come

    @property
    def missing(self) -> tuple[ServiceName, ...]:
        """Services without a worker that accepts requests."""
        return tuple(service for service in SERVICES if not self.workers[service])

    @property
    def status(self) -> ModelStatus:
        """Whether it can be served, or lacks compute alone, which loads or is to be started."""
        if not self.missing:
            return "loaded"
        if self.missing != ("compute",):
            return "incomplete"
        return "loading" if self.num_loading else "asleep"

    def with_computes(self, computes: tuple[RegisteredWorker, ...]) -> Group:
        """Return the group with some of its computes alone."""
        if len(computes) == len(self.workers["compute"]):
            return self
        return Group(self.card, {**self.workers, "compute": computes}, self.num_loading)

    def without(self, instances: Collection[str]) -> Group:
        if not instances:
            return self
        rest = {
            service: tuple(each for each in workers if each.address.instance_id not in instances)
            for service, workers in self.workers.items()
        }
        return Group(self.card, rest, self.num_loading)


def groups_of(workers: Iterable[RegisteredWorker], served: Iterable[ModelCard]) -> list[Group]:
    """Group workers by the model revisions that they can serve together, complete or not.

    A model without a compute has a group, too: one that was `served` before, if there are workers
    that can read it, and the own model of a tokenizer or detokenizer.
    """
    computes: dict[Revision, list[RegisteredWorker]] = {}
    readers: list[RegisteredWorker] = []
    for worker in workers:
        if worker.service == "compute":
            computes.setdefault(_revision(worker.model), []).append(worker)
        else:
            readers.append(worker)
    cards = {key: max(map(_model, found), key=_size) for key, found in computes.items()}
    absent = (card for card in served if any(reader.model.reads(card) for reader in readers))
    for card in (*absent, *map(_model, readers)):
        if card.name not in {name for name, _ in cards} or _revision(card) in cards:
            cards.setdefault(_revision(card), card)
    return [_group(card, computes.get(key, ()), readers) for key, card in cards.items()]


def with_room(
    computes: Sequence[RegisteredWorker], num_tokens: int
) -> tuple[RegisteredWorker, ...]:
    """Return those whose context has room for so many tokens, or else those with the longest."""
    lengths = [each.model.max_model_len or MAX_LENGTH for each in computes]
    least = min(num_tokens, max(lengths, default=0))
    return tuple(each for each, most in zip(computes, lengths, strict=True) if most >= least)


def only_model(groups: Sequence[Group]) -> str:
    """Return the name of the only model that is served; ApiError 400 where there are several."""
    complete = [group for group in groups if not group.missing]
    names = sorted({group.card.name for group in complete or groups})
    if len(names) > 1:
        served = ", ".join(names[:MAX_NAMED_MODELS])
        message = f"is required where several are served: {served}"
        raise bad_field("model", message, "missing_required_parameter")
    return names[0]


def name_of(address: Address) -> str:
    """Return a readable name: `compute-0` where the inbox is a file, else host and port."""
    return address.endpoint.rpartition("/")[2].removesuffix(".sock")


def _group(
    card: ModelCard, computes: Sequence[RegisteredWorker], readers: Sequence[RegisteredWorker]
) -> Group:
    able = [*computes, *(reader for reader in readers if reader.model.reads(card))]
    workers: dict[ServiceName, tuple[RegisteredWorker, ...]] = {
        service: tuple(each for each in able if each.service == service and each.accepts)
        for service in SERVICES
    }
    return Group(card, workers, sum(each.model.loading for each in computes))


def _revision(card: ModelCard) -> Revision:
    return card.name, card.revision


def _model(worker: RegisteredWorker) -> ModelCard:
    return worker.model


def _size(card: ModelCard) -> tuple[bool, int]:
    return not card.loading, card.max_model_len
