"""Preemption: taking the pages of a running sequence without losing any of its tokens."""

from __future__ import annotations

from services.compute.kv.memory import KVMemory
from services.compute.scheduler.residents import Residents
from services.compute.scheduler.sequence import Sequence, Status
from services.compute.scheduler.transfers import Transfers
from services.compute.scheduler.waiting import WaitingLine
from services.compute.step import StepPlan


class Preemption:
    """Swaps a sequence out while there is swap space for all of it, else lets it recompute.

    Only sequences without a row in flight are preempted, so that every token they have sampled is
    known. Full pages stay in the prefix tree as long as nobody needs them, so that a recompute
    often finds part of its work done.
    """

    __slots__ = ("_memory", "_residents", "_transfers", "_waiting", "num_total")

    def __init__(
        self, memory: KVMemory, residents: Residents, waiting: WaitingLine, transfers: Transfers
    ) -> None:
        self._memory = memory
        self._residents = residents
        self._waiting = waiting
        self._transfers = transfers
        self.num_total = 0

    def preempt(self, victim: Sequence, step_id: int) -> None:
        """Free the victim's device pages and queue it again; `step_id` is the next plan's."""
        if victim.in_flight:
            raise RuntimeError(f"{victim.attempt} has a row in flight")
        num_pages = self._memory.pages_for(victim.computed)
        host_pages = self._memory.host.take(num_pages) if victim.can_swap else None
        if host_pages:
            self._transfers.swap_out(victim.table.pages[:num_pages], host_pages)
            victim.host_pages = host_pages
            victim.swap_step = step_id
            victim.status = Status.SWAPPED
        else:
            victim.restart(0)
            victim.status = Status.WAITING
        victim.table.release()
        self._residents.leave(victim)
        self._waiting.add(victim)
        self.num_total += 1

    def distrust_swaps(self, plan: StepPlan) -> None:
        """The step that should have swapped pages out or in broke: their sequences recompute."""
        for sequence in self._waiting:
            if sequence.status is Status.SWAPPED and sequence.swap_step == plan.step_id:
                self._transfers.drop(sequence.host_pages)
                sequence.host_pages = []
                sequence.restart(0)
                sequence.status = Status.WAITING
        targets = {page for _, page in plan.swap_in}
        for sequence in self._residents.running if targets else ():
            table = sequence.table
            # One that is in flight has a row in a later step, which came after the swap.
            if not sequence.in_flight and not targets.isdisjoint(table.pages[len(table.nodes) :]):
                sequence.restart(len(table.nodes) * sequence.page_tokens)
