"""The planner: which rows the next step holds, and where their pages come from."""

from __future__ import annotations

from operator import attrgetter

from services.compute.scheduler.admission import Admission
from services.compute.scheduler.draft import Chunk, Draft, StepLimits
from services.compute.scheduler.forks import Forks
from services.compute.scheduler.policy import Quota
from services.compute.scheduler.preemption import Preemption
from services.compute.scheduler.residents import Residents
from services.compute.scheduler.sequence import Sequence
from services.compute.scheduler.waiting import WaitingLine

_by_order = attrgetter("order")


class Planner:
    """Fills one step within a quota.

    When pages run out, the row that needs one is held, and so is the youngest sequence while it
    has rows in flight; a step later nothing of it is in flight, and it is preempted if the page is
    still missing. Until then nobody is admitted. The oldest sequence can take everything from
    the others, and alone it fits (the door saw to that), so there is always progress.
    """

    __slots__ = (
        "_admission",
        "_forks",
        "_held",
        "_limits",
        "_preemption",
        "_residents",
        "_short_of_pages",
        "_waiting",
    )

    def __init__(
        self,
        residents: Residents,
        waiting: WaitingLine,
        admission: Admission,
        preemption: Preemption,
        forks: Forks,
        limits: StepLimits,
    ) -> None:
        self._residents = residents
        self._waiting = waiting
        self._admission = admission
        self._preemption = preemption
        self._forks = forks
        self._limits = limits
        self._held: set[Sequence] = set()
        self._short_of_pages = False

    def draft(self, quotas: tuple[Quota, ...], step_id: int) -> Draft:
        """Draft the next step by the first quota that yields any row; its rows count as launched.

        An empty draft says that nothing can run now.
        """
        self._held.clear()
        if not self._residents.decoding:
            self._short_of_pages = False
        draft = Draft()
        for quota in quotas:
            budget = self._limits.tokens
            if quota.decode:
                draft.decodes = self._decode_rows(step_id)
                budget -= len(draft.decodes)
            budget = min(budget, quota.prefill_tokens)
            if budget > 0:
                budget = self._go_on_prefilling(draft, budget)
                self._start(draft, budget, quota.new_sequences)
            if draft:
                break
        self._launch(draft)
        return draft

    def _decode_rows(self, step_id: int) -> list[Sequence]:
        """All decoding sequences that have, or get, a place for their next token."""
        residents = self._residents
        fenced = [s for s in residents.decoding if s.launched == s.fence]
        self._short_of_pages = False
        if fenced:
            finished = {s for s in fenced if s.done_launching}
            if finished:
                residents.drop_launched_out(finished)
            fenced.sort(key=_by_order)
            for sequence in fenced:
                if sequence.slot >= 0 and sequence not in finished and sequence not in self._held:
                    self._make_room(sequence, step_id)
        if self._held:
            return [s for s in residents.decoding if s not in self._held]
        return residents.decoding

    def _make_room(self, sequence: Sequence, step_id: int) -> None:
        """Get a page for the next position of a decoding sequence, or hold it."""
        while not sequence.table.grow(sequence.launched + 1):
            self._short_of_pages = True
            victim = self._residents.youngest()
            if victim is sequence or victim.in_flight:
                # The youngest waits for pages without giving up its own: nobody asked for them.
                self._held.add(victim)
                self._held.add(sequence)
                return
            self._preemption.preempt(victim, step_id)
        sequence.set_fence()
        self._residents.retabled.append(sequence)

    def _go_on_prefilling(self, draft: Draft, budget: int) -> int:
        """Give chunks to those that run already; return what is left of the budget."""
        for sequence in self._residents.prefilling:
            if budget <= 0:
                break
            if sequence not in self._held:
                budget -= self._add_chunk(draft, sequence, budget)
        return budget

    def _start(self, draft: Draft, budget: int, num_new: int) -> None:
        """Admit from the waiting line while there are budget, slots and pages."""
        if self._short_of_pages:
            return
        residents = self._residents
        while budget > 0 and residents.has_free_slot:
            sequence = self._waiting.first(newcomers=num_new > 0)
            if sequence is None:
                return
            is_new = not sequence.joined
            if not self._admission.admit(sequence):
                return
            num_new -= is_new
            budget -= self._add_chunk(draft, sequence, budget)

    def _add_chunk(self, draft: Draft, sequence: Sequence, budget: int) -> int:
        """Add as many known tokens of a sequence as the budget allows; return their number."""
        start, num_known = sequence.launched, sequence.num_known
        scored = sequence.has_to_score(start)
        if scored:
            budget = min(budget, self._limits.scored_tokens - draft.num_scored)
        stop = min(num_known, start + budget)
        if stop <= start:  # no more scores in this step; or a pooled one that awaits its result
            return 0
        draft.num_scored += scored * (stop - start)
        samples = stop == num_known and not sequence.params.pools
        draft.chunks.append(Chunk(sequence, start, stop, samples))
        self._share(draft, draft.chunks[-1])
        return stop - start

    def _share(self, draft: Draft, chunk: Chunk) -> None:
        """Let those who come next find the pages that a chunk fills, already in this step.

        A guided sample may turn out void, and its position be computed again: its page is not
        shared before that is known.
        """
        sequence = chunk.sequence
        if not (self._waiting or sequence.followers):
            return  # nobody comes next: 512 pages take 0.25 ms, which can pass beside the step
        num_certain = chunk.stop - (chunk.samples and sequence.params.guided)
        nodes = sequence.table.publish(sequence.page_keys, num_certain, launched=False)
        draft.published += [(sequence, node) for node in nodes]
        if sequence.followers and chunk.stop >= sequence.prompt_len:
            self._forks.release(sequence)

    def _launch(self, draft: Draft) -> None:
        """Count the drafted rows as launched."""
        for sequence in draft.decodes:
            sequence.launched += 1
        if not draft.chunks:
            return
        begun = []
        for chunk in draft.chunks:
            chunk.sequence.launched = chunk.stop
            if chunk.samples:
                chunk.sequence.set_fence()
                begun.append(chunk.sequence)
        if begun:
            self._residents.begin_decoding(begun)
