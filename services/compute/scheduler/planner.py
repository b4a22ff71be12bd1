"""The planner: which rows the next step holds, and where their pages come from."""

from __future__ import annotations

from array import array

from services.compute.kv import Node
from services.compute.scheduler.policies import Quota
from services.compute.scheduler.sequence import Chunk, Draft, Sequence, Status
from services.compute.scheduler.state import SchedulerState, by_order
from services.compute.step import StepPlan


class Planner:
    """Fills one step within a quota.

    The first in the waiting queue runs when its prompt fits; nothing overtakes it. It takes pages
    for all its known tokens at once, so a prefill in chunks never starves half way; pages for
    generated tokens come one by one.

    When pages run out, the row that needs one is held, and so is the youngest sequence while it
    has rows in flight; a step later nothing of it is in flight, and it is preempted if the page is
    still missing. Until then nothing is admitted. The oldest sequence can take everything from
    the others, and alone it fits (intake checked that), so there is always progress.
    """

    def __init__(self, state: SchedulerState, max_tokens: int, max_scored_tokens: int) -> None:
        self._state = state
        self._running = state.running
        self._waiting = state.waiting
        self._max_tokens = max_tokens
        self._max_scored_tokens = max_scored_tokens
        self._held: set[Sequence] = set()
        self._short_of_pages = False
        self._head: Sequence | None = None  # the first in the queue, if it did not fit
        self._head_nodes: list[Node] = []  # its pages that the prefix tree has
        self.num_started_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.preemptions_total = 0

    def draft(self, quotas: tuple[Quota, ...], step_id: int, now_s: float) -> Draft:
        """Draft the next step by the first quota that yields any row; its rows count as scheduled.

        An empty draft says that nothing can run now.
        """
        self._held.clear()
        if not self._running.decoding:
            self._short_of_pages = False
        draft = Draft()
        for quota in quotas:
            budget = self._max_tokens
            if quota.decode:
                draft.decodes = self._decode_rows(step_id)
                budget -= len(draft.decodes)
            budget = min(budget, quota.prefill_tokens)
            if budget > 0:
                self._add_chunks(draft, budget, quota.new_sequences, now_s)
            if draft:
                break
        self._schedule(draft)
        return draft

    def recompute_swapped(self, broken: StepPlan) -> None:
        """A step broke that should have swapped pages out or in: their sequences recompute."""
        for sequence in self._waiting:
            if sequence.status is Status.SWAPPED and sequence.swap_step == broken.step_id:
                self._state.transfers.drop(sequence.host_pages)
                sequence.host_pages = array("i")
                sequence.restart(0)
                sequence.status = Status.WAITING
        targets = {page for _, page in broken.swap_in}
        for sequence in self._running if targets else ():
            table = sequence.table
            # One that is in flight has a row in a later step, which came after the swap.
            if not sequence.in_flight and not targets.isdisjoint(table.pages[len(table.nodes) :]):
                sequence.restart(len(table.nodes) * sequence.page_tokens)

    def _decode_rows(self, step_id: int) -> list[Sequence]:
        """All decoding sequences that have, or get, a place for their next token."""
        running = self._running
        due = [s for s in running.decoding if s.num_scheduled_tokens == s.replan_at]
        self._short_of_pages = False
        if due:
            finished = {s for s in due if s.is_fully_scheduled}
            if finished:
                running.stop_decoding(finished)
            due.sort(key=by_order)
            for sequence in due:
                if sequence.slot >= 0 and sequence not in finished and sequence not in self._held:
                    self._make_room(sequence, step_id)
        if self._held:
            return [s for s in running.decoding if s not in self._held]
        return running.decoding

    def _make_room(self, sequence: Sequence, step_id: int) -> None:
        """Get a page for the next position of a decoding sequence, or hold it."""
        while not sequence.table.grow(sequence.num_scheduled_tokens + 1):
            self._short_of_pages = True
            victim = self._running.youngest()
            if victim is sequence or victim.in_flight:
                # The youngest waits for pages without giving up its own: no older one needs them.
                self._held.add(victim)
                self._held.add(sequence)
                return
            self._preempt(victim, step_id)
        sequence.set_replan()
        self._running.dirty_tables.append(sequence)

    def _preempt(self, victim: Sequence, step_id: int) -> None:
        """Free the victim's device pages and queue it again; `step_id` is the next plan's.

        It has no row in flight, so every token that it sampled is known. It is swapped out while
        there is swap space for all of it, else it recomputes; its full pages stay in the prefix
        tree until they are needed, so that often part of the work is found done.
        """
        state = self._state
        num_pages = state.memory.pages_for(victim.num_computed_tokens)
        host_pages = state.memory.host.take(num_pages) if victim.can_swap else None
        if host_pages:
            state.transfers.swap_out(victim.table.pages[:num_pages], host_pages)
            victim.host_pages = host_pages
            victim.swap_step = step_id
            victim.status = Status.SWAPPED
        else:
            victim.restart(0)
            victim.status = Status.WAITING
        victim.table.release()
        state.running.leave(victim)
        state.waiting.add(victim)
        self.preemptions_total += 1

    def _add_chunks(self, draft: Draft, budget: int, num_new: int, now_s: float) -> None:
        """Continue prefills, then start sequences, up to so many tokens and new sequences."""
        for sequence in self._running.prefilling:
            if budget <= 0:
                return
            if sequence not in self._held:
                budget -= self._add_chunk(draft, sequence, budget)
        if self._short_of_pages:
            return
        while budget > 0 and self._running.has_free_slot:
            first = self._waiting.first(allow_new=num_new > 0)
            is_new = first is not None and not first.has_run
            if first is None or not self._start(first, now_s):
                return
            num_new -= is_new
            budget -= self._add_chunk(draft, first, budget)

    def _start(self, sequence: Sequence, now_s: float) -> bool:
        """Give the first in the queue its pages and a slot; False if it has to wait."""
        state, memory = self._state, self._state.memory
        # While it stays the first, only what has come and gone since is looked up.
        nodes = self._head_nodes if sequence is self._head else None
        max_pages = sequence.num_reusable // memory.page_tokens
        nodes = sequence.table.find(sequence.page_keys, max_pages, nodes)
        self._head, self._head_nodes = sequence, nodes
        num_missing = memory.pages_for(sequence.num_tokens) - len(nodes)
        # One page in four running sequences stays free: they need it within four steps or so.
        # Without it the new sequence is soon the youngest when pages run out, its prefill lost.
        room = memory.num_available - len(state.running) // 4
        if num_missing > room - memory.tree.num_idle(nodes):
            return False
        self._head = None
        state.waiting.remove(sequence)
        sequence.table.adopt(nodes)
        if not sequence.table.grow(sequence.num_tokens):
            raise RuntimeError("pages counted as available could not be taken")
        num_cached = len(nodes) * memory.page_tokens
        if sequence.host_pages:
            self._swap_in(sequence, len(nodes))
        sequence.restart(max(sequence.num_computed_tokens, num_cached))
        if not sequence.has_run:
            sequence.queued_s = now_s - sequence.params.arrived_at_s
            sequence.cached_tokens = min(num_cached, sequence.prompt_len)
            self.num_started_total += 1
            self.prompt_tokens_total += sequence.prompt_len
            self.cached_tokens_total += sequence.cached_tokens
        state.running.enter(sequence)
        return True

    def _swap_in(self, sequence: Sequence, num_shared: int) -> None:
        transfers, host_pages = self._state.transfers, sequence.host_pages
        wanted = host_pages[num_shared:]
        pages = sequence.table.pages[num_shared : num_shared + len(wanted)]
        transfers.swap_in(wanted, pages)
        transfers.spend(host_pages)
        sequence.host_pages = array("i")

    def _add_chunk(self, draft: Draft, sequence: Sequence, budget: int) -> int:
        """Add as many known tokens of a sequence as the budget allows; return their number."""
        start, num_tokens = sequence.num_scheduled_tokens, sequence.num_tokens
        scored = sequence.has_to_score(start)
        if scored:
            budget = min(budget, self._max_scored_tokens - draft.num_scored)
        stop = min(num_tokens, start + budget)
        if stop <= start:  # no more scores in this step; or a pooled one that awaits its result
            return 0
        draft.num_scored += scored * (stop - start)
        samples = stop == num_tokens and not sequence.params.pools
        draft.chunks.append(Chunk(sequence, start, stop, samples))
        if self._waiting or sequence.followers:  # else that can pass beside the step
            self._publish(draft, draft.chunks[-1])
        return stop - start

    def _publish(self, draft: Draft, chunk: Chunk) -> None:
        """Let later sequences find the pages that a chunk fills, already in this step.

        A structured sample may be skipped and its position computed again: its page is not shared
        before that is known.
        """
        sequence = chunk.sequence
        num_certain = chunk.stop - (chunk.samples and sequence.params.structured)
        nodes = sequence.table.publish(sequence.page_keys, num_certain, launched=False)
        draft.published += [(sequence, node) for node in nodes]
        if sequence.followers and chunk.stop >= sequence.prompt_len:
            self._state.forks.release(sequence)

    def _schedule(self, draft: Draft) -> None:
        for sequence in draft.decodes:
            sequence.num_scheduled_tokens += 1
        if not draft.chunks:
            return
        begun = []
        for chunk in draft.chunks:
            chunk.sequence.num_scheduled_tokens = chunk.stop
            if chunk.samples:
                chunk.sequence.set_replan()
                begun.append(chunk.sequence)
        if begun:
            self._running.begin_decoding(begun)
