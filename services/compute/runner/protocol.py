"""The runner: the device, seen from the engine. Variants are files beside this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from services.compute.expert_counters import ExpertCounters
from services.compute.kv.memory import KVGroup
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.step import DEVICE_TOKEN, StepPlan, StepResult, TokenMasks


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What the runner can do and how much it holds; fixed once it is loaded and warmed up."""

    vocab_size: int  # width of the logits: ids at or above it must not come in
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_groups: tuple[KVGroup, ...]
    num_pages: int  # device pages: one pool, from which all groups draw
    num_host_pages: int  # swap space
    max_num_seqs: int  # slots
    max_step_tokens: int  # T of one plan
    stall_after_s: float  # the longest that a healthy device shows no progress
    overlaps: bool = True  # forward returns before the device has computed
    pooling: str = ""  # how a prompt becomes an embedding; empty for a model not made for it
    generates: bool = True  # False for a model without a head
    max_drafts: int = 0  # that it puts behind a token of a decode row
    rows_together: int = 1  # of a token and its drafts, at most, that read their context once
    computes_drafts: bool = False  # a pass of a drafter for each of them
    num_stages: int = 1  # that each step passes, one after the other

    @property
    def max_ahead(self) -> int:
        """Positions behind a decode row that get pages: of its drafts, and of those that a drafter
        of the last stage computes behind them before the next plan."""
        says_drafts = self.computes_drafts and self.num_stages > 1
        return 2 * self.max_drafts + 1 if says_drafts else self.max_drafts

    def steps_ahead(self, in_flight_steps: int) -> int:
        """How many steps may be without a result when the next one is planned.

        As many as the settings say where steps overlap; of stages, each has one.
        """
        return in_flight_steps if self.overlaps and self.num_stages == 1 else self.num_stages - 1

    @property
    def pauses(self) -> bool:
        """Whether `go_on` has something to do: compute where nothing overlaps, and else wait for
        what another stage makes."""
        return not self.overlaps or self.num_stages > 1


class SlotErrors(Exception):
    """Settings of new sequences that cannot be taken, by slot; nothing was launched."""

    def __init__(self, by_slot: dict[int, Exception]) -> None:
        super().__init__("; ".join(f"slot {slot}: {error!r}" for slot, error in by_slot.items()))
        self.by_slot = by_slot


class StepDevice(Protocol):
    """What a runner and an executor have in common: all that follows a step's launch."""

    def spec(self) -> RunnerSpec: ...

    def go_on(self, ticket: Any) -> bool:
        """Where nothing overlaps, compute for a while; returns whether the forward pass is done, or
        on the device, whose stage may have to wait for another's."""
        ...

    def result(self, ticket: Any) -> StepResult:
        """Wait for the step's tokens: the one wait there is."""
        ...

    def ready(self, ticket: Any) -> bool:
        """Whether `result` would return at once."""
        ...

    def transfer(self, direction: Direction, pages: PagePairs) -> Any:
        """Start copying pages between device and host, without waiting; return a ticket for it.

        What is read is what all steps launched so far leave, and all transfers before. Until the
        ticket is ready no step may write to a page that is read, nor use one that is written.
        Raises only if nothing has been copied.
        """
        ...

    def transferred(self, ticket: Any) -> bool:
        """Whether a transfer's pages have been copied; steps launched from now on may use them."""
        ...

    def expert_counters(self) -> ExpertCounters | None:
        """What counts the tokens of each expert; None for a model without experts."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


class Runner(StepDevice, Protocol):
    """Executes step plans in the order given; forward and sample do not wait for the device.

    Where the device is the CPU, nothing overlaps: `go_on` computes. Such a runner says so in its
    spec, and the engine then takes each result before it plans on.
    """

    def forward(self, plan: StepPlan) -> Any:
        """Apply the plan's deltas and launch its forward pass.

        Returns a ticket, opaque to the engine, for the step on its way through the device.

        Raises SlotErrors, before anything else is done, for new sequences whose settings cannot be
        taken; the plan may then come again without those settings.
        """
        ...

    def sample(self, ticket: Any, masks: TokenMasks | None = None) -> Any:
        """Launch the sampling of the plan's samples; return the ticket.

        Structured samples are all either in the masks or skipped.
        """
        ...


def check_tokens(plan: StepPlan, vocab_size: int) -> None:
    """Raise ValueError for an input id that is neither of the vocabulary nor DEVICE_TOKEN."""
    tokens = plan.tokens
    if not len(tokens):
        return
    lowest, highest = np.minimum.reduce(tokens), np.maximum.reduce(tokens)
    if lowest < DEVICE_TOKEN or highest >= vocab_size:
        raise ValueError(
            f"step {plan.step_id}: token ids must be in 0 .. {vocab_size - 1}, "
            f"not {lowest} .. {highest}"
        )
