"""The planner: which rows the next step holds, and where their pages come from."""

from __future__ import annotations

from services.compute.kv.page_table import Paths
from services.compute.kv.transfer import Direction
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.decode_turns import DecodeTurns
from services.compute.scheduler.drafting import Drafting
from services.compute.scheduler.policies import Quota
from services.compute.scheduler.recovery import PrefillBudget, prefill_budget
from services.compute.scheduler.sequence import Chunk, Draft, Sequence, Status
from services.compute.scheduler.state import (
    SchedulerSettings,
    SchedulerState,
    by_order,
    most_at_once,
)


class Planner:
    """Fills one step within a quota.

    The first in the waiting queue runs when its prompt fits; nothing overtakes it while it is the
    first. It takes pages for all its known tokens at once, so a prefill in chunks never starves
    half way; pages for generated tokens come one by one. Of a window it takes those of one chunk
    at a time, and gives back as many behind it.

    When pages run out, the row that needs one is held, and so is the youngest sequence while it
    has rows in flight; a step later nothing of it is in flight, and it is preempted if the page is
    still missing. Until then nothing is admitted. The oldest sequence can take everything from
    the others, and alone it fits (intake checked that), so there is always progress.

    The pages of a victim that is swapped out come free when they have been copied. Rows wait for as
    many as are coming; only who needs more takes the next victim's.
    """

    def __init__(
        self,
        state: SchedulerState,
        spec: RunnerSpec,
        settings: SchedulerSettings,
        drafting: Drafting | None = None,
    ) -> None:
        self._state = state
        self._drafting = drafting
        self._running = state.running
        self._waiting = state.waiting
        self._max_tokens = spec.max_step_tokens
        self._most_at_once = most_at_once(settings, spec)
        self._max_scored_tokens = settings.max_scored_tokens
        self._turns = DecodeTurns(state.running, settings.num_groups)
        self._held: set[Sequence] = set()
        self._step_id = 0  # the next plan's
        self._num_awaited = 0  # pages that held rows wait for transfers to free
        self._short_of_pages = False
        self._head: Sequence | None = None  # the first in the queue, if it did not fit
        self._lacking = 0  # pages that it lacked
        self._head_found: Paths | None = None  # its pages that the prefix trees have
        self.num_started_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.preemptions_total = 0

    def draft(self, quotas: tuple[Quota, ...], step_id: int, now_s: float) -> Draft:
        """Draft the next step by the first quota that yields any row; its rows count as scheduled.

        An empty draft says that nothing can run now.
        """
        self._held.clear()
        self._num_awaited = 0
        self._step_id = step_id
        if not self._running.decoding:
            self._short_of_pages = False
        if any(quota.new_sequences for quota in quotas):
            self._make_way()
        draft = Draft()
        for quota in quotas:
            self._make_rooms(quota)
            budget = self._max_tokens
            if quota.decode:
                draft.decodes = self._turns.rows(self._held)
                budget -= len(draft.decodes)
                if self._drafting is not None:
                    draft.num_drafts, draft.given_drafts = self._drafting.choose(draft.decodes)
                    budget -= int(draft.num_drafts.sum())
            budget = min(budget, quota.prefill_tokens)
            if budget > 0:
                self._add_chunks(draft, budget, quota.new_sequences, now_s)
            if draft:
                break
        self._schedule(draft)
        return draft

    def transferred(self, number: int) -> None:
        """A transfer has ended: a sequence that waited for it runs from the next plan on."""
        sequence = self._state.transfers.end(number)
        if sequence.status is Status.LOADING and sequence.transfer == number:
            self._state.drop_host_pages(sequence)
            self._running.enter(sequence)

    def transfer_failed(self, number: int) -> None:
        """Nothing was copied: the sequence computes everything again, if it needs its pages yet."""
        self._recompute(self._state.transfers.end(number))

    def recompute_swapped(self, broken_id: int) -> None:
        """A step broke: what was swapped out while it was in flight may hold pages that it wrote.

        They may have taken the place of the sequence's own in its table.
        """
        for sequence in [*self._waiting, *self._running]:
            if sequence.swap_step > broken_id:
                self._recompute(sequence)

    def _recompute(self, sequence: Sequence) -> None:
        """Forget the pages that a sequence has on the host, if it is not running."""
        if sequence.status is Status.LOADING:
            self._requeue(sequence, Status.WAITING)
        elif sequence.status is not Status.SWAPPED:
            return
        self._state.drop_host_pages(sequence)
        sequence.restart(0)
        sequence.status = Status.WAITING

    def _make_rooms(self, quota: Quota) -> None:
        """Get pages for all rows that the next step may have of running sequences, by seniority."""
        running = self._running
        due: list[Sequence] = []
        if quota.decode:
            self._short_of_pages = False
            due = [s for s in self._turns.begin() if s.num_scheduled_tokens >= s.replan_at]
            scheduled = [s for s in due if s.is_fully_scheduled]
            if scheduled:
                # If all drafts are right; else they go on when that is known.
                self._held.update(s for s in scheduled if s.num_drafts)
                finished = {s for s in scheduled if not s.num_drafts}
                if finished:
                    running.stop_decoding(finished)
                due = [s for s in due if not s.is_fully_scheduled]
        chunk_stops = self._chunks_without_room(quota.prefill_tokens) if running.prefilling else {}
        due += chunk_stops
        if not due:
            return
        due.sort(key=by_order)
        for sequence in due:
            if sequence.slot >= 0 and sequence not in self._held:
                self._make_room(sequence, quota.prefill_tokens)

    def _make_way(self) -> None:
        """Preempt a sequence of the busiest client for one that has less than its part.

        Only if that one comes next and has no slot or pages; and only as long as the busiest keeps
        as many as the other then has. The client whose sequence it is pays with computing it again.
        This goes before making rooms: a row that is held must not get a page that is then not sent.
        """
        first = self._waiting.first(allow_new=True)
        if first is None or self._short_of_pages:
            return
        if not all(map(first.precedes, self._running.prefilling)):
            return  # these have a step's tokens before it, and until then another may come first
        lacks_pages = self._running.has_free_slot
        if lacks_pages and self._head is not first:
            return
        busiest = self._state.shares.busiest()
        if busiest is None or busiest.num_running <= first.share.num_running + 1:
            return
        victim = self._running.youngest(busiest)
        if busiest.tokens < first.share.tokens or victim.precedes(first):
            return  # the victim would come next, and take its place again
        if lacks_pages and self._lacking > victim.table.room // victim.page_tokens:
            return  # its pages would not be enough
        if victim.in_flight:  # of its rows nothing is in flight a step later
            self._held.add(victim)
        else:
            self._preempt(victim)

    def _chunks_without_room(self, budget: int) -> list[Sequence]:
        """The prefills whose next chunks may not have their pages yet, as of a window."""
        due = []
        left = prefill_budget(budget, self._running, self._waiting)
        for sequence in self._running.prefilling:
            if left.tokens <= 0:
                break
            start = sequence.num_scheduled_tokens
            stop = min(sequence.num_tokens, start + left.of(sequence))
            if stop > sequence.table.room:
                due.append(sequence)
            left.take(sequence, stop - start)
        return due

    def _make_room(self, sequence: Sequence, max_chunk: int) -> None:
        """Get the pages of a sequence's next position or chunk, or hold it."""
        start, num_tokens = sequence.num_scheduled_tokens, sequence.num_tokens
        if start + 1 < num_tokens:
            stop = min(num_tokens, start + max_chunk)
        else:
            stop = start + 1  # and as many drafts as there may be tokens
            stop = max(stop, min(stop + sequence.params.max_ahead, sequence.token_limit - 1))
        while not sequence.table.grow(stop, sequence.next_position):
            self._short_of_pages = True
            if self._are_coming(sequence.table.num_lacking(stop)):
                self._held.add(sequence)
                return
            victim = self._running.youngest()
            if victim is sequence or victim.in_flight:
                # The youngest waits for pages without giving up its own: no older one needs them.
                self._held.add(victim)
                self._held.add(sequence)
                return
            self._preempt(victim)
        sequence.set_replan()
        self._running.dirty_tables.append(sequence)

    def _are_coming(self, num_pages: int) -> bool:
        """Whether transfers will free so many pages, beside those that are waited for already."""
        memory = self._state.memory
        num_expected = memory.num_expected
        if num_expected <= memory.num_available or self._num_awaited + num_pages > num_expected:
            return False
        self._num_awaited += num_pages
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Free the victim's device pages and queue it again.

        It has no row in flight, so every token that it sampled is known. It is swapped out while
        there is swap space for all of it, else it recomputes; its full pages stay in the prefix
        tree until they are needed, so that often part of the work is found done. If it is still
        loading, its pages on the host are as good as they were.
        """
        if victim.status is Status.LOADING or self._swap_out(victim):
            self._requeue(victim, Status.SWAPPED)
        else:
            victim.restart(0)
            self._requeue(victim, Status.WAITING)
        self.preemptions_total += 1

    def _swap_out(self, victim: Sequence) -> bool:
        state = self._state
        pages = victim.table.swapped_pages(victim.num_computed_tokens)
        host_pages = state.memory.host.take(len(pages)) if victim.can_swap else None
        if not host_pages:
            return False
        state.transfers.start(Direction.TO_HOST, pages, host_pages, victim)
        victim.host_pages, victim.swap_step = host_pages, self._step_id
        return True

    def _requeue(self, sequence: Sequence, status: Status) -> None:
        sequence.table.release()
        self._running.leave(sequence)
        sequence.status = status
        self._waiting.add(sequence)

    def _add_chunks(self, draft: Draft, budget: int, num_new: int, now_s: float) -> None:
        """Continue prefills, then start sequences, up to so many tokens and new sequences.

        A client whose turn comes before that of all prefills under way does not wait for their end.
        """
        prefilling = self._running.prefilling
        left = prefill_budget(budget, self._running, self._waiting)
        first = self._overtaking(prefilling) if num_new else None
        if first is not None and self._start(first, left.of(first), now_s):
            num_new -= 1
            self._add_chunk(draft, first, left)
        for sequence in prefilling:
            if left.tokens <= 0:
                return
            if sequence not in self._held:
                self._add_chunk(draft, sequence, left)
        if self._short_of_pages:
            return
        while left.tokens > 0 and self._running.has_free_slot:
            first = self._waiting.first(num_new > 0, goes_on=left.recovery > 0)
            is_new = first is not None and not first.has_run
            if first is None or not self._start(first, left.of(first), now_s):
                return
            num_new -= is_new
            self._add_chunk(draft, first, left)

    def _overtaking(self, prefilling: list[Sequence]) -> Sequence | None:
        """The first in the queue, if its turn comes before those whose prompts are under way."""
        if not prefilling or self._short_of_pages or not self._running.has_free_slot:
            return None
        first = self._waiting.first(allow_new=True)
        if first is None or not all(first.precedes(other) for other in prefilling):
            return None
        return first

    def _start(self, sequence: Sequence, budget: int, now_s: float) -> bool:
        """Give the first in the queue its pages and a slot; False if it has to wait.

        It runs at once, or when its pages are back from the host.
        """
        state, table, num_tokens = self._state, sequence.table, sequence.num_tokens
        # While it stays the first, only what has come and gone since is looked up.
        found = self._head_found if sequence is self._head else None
        max_pages = sequence.num_reusable // sequence.page_tokens
        found = table.find(sequence.page_keys, max_pages, found)
        self._head, self._head_found = sequence, found
        num_cached = table.num_hit(found) * sequence.page_tokens
        start = max(sequence.num_computed_tokens, num_cached)
        nodes = table.select(found, start)
        num_missing = table.num_missing(nodes, start, num_tokens, self._most_at_once)
        # A page of each group in four running sequences stays free: they need it within four steps
        # or so. Without it the new sequence is soon the youngest when pages run out, its prefill
        # lost.
        num_kept = len(state.running) // 4 * state.memory.num_groups
        self._lacking = num_missing + num_kept - state.memory.num_available
        if self._lacking > 0:
            return False
        self._head = None
        state.waiting.remove(sequence)
        table.adopt(nodes, start)
        if not table.reserve(num_tokens, min(num_tokens, start + budget)):
            raise RuntimeError("pages counted as available could not be taken")
        is_loading = self._swap_in(sequence, start)
        sequence.restart(start)
        sequence.charged = max(sequence.charged, start)
        if not sequence.has_run:
            sequence.queued_s = now_s - sequence.params.arrived_at_s
            sequence.cached_tokens = min(num_cached, sequence.prompt_len)
            self.num_started_total += 1
            self.prompt_tokens_total += sequence.prompt_len
            self.cached_tokens_total += sequence.cached_tokens
        if not is_loading:
            state.running.enter(sequence)
        return True

    def _swap_in(self, sequence: Sequence, start: int) -> bool:
        """Bring back what a swapped sequence has on the host alone; False if that is nothing."""
        state, host_pages = self._state, sequence.host_pages
        if host_pages and start == sequence.num_computed_tokens:  # else a hit reaches further
            sources, targets = sequence.table.restored(start, host_pages)
            if sources:
                number = state.transfers.start(Direction.TO_DEVICE, sources, targets, sequence)
                sequence.transfer = number
                state.running.load(sequence)
                return True
        state.drop_host_pages(sequence)
        return False

    def _add_chunk(self, draft: Draft, sequence: Sequence, left: PrefillBudget) -> None:
        """Add as many known tokens of a sequence as the budget allows, and take them from it."""
        if sequence.status is Status.LOADING:
            return
        start, num_tokens = sequence.num_scheduled_tokens, sequence.num_tokens
        budget, scored = left.of(sequence), sequence.has_to_score(start)
        if scored:
            budget = min(budget, self._max_scored_tokens - draft.num_scored)
        stop = min(num_tokens, start + budget, sequence.table.room)
        if stop <= start:  # no more scores in this step; or a pooled one that awaits its result
            return
        left.take(sequence, stop - start)
        draft.num_scored += scored * (stop - start)
        samples = stop == num_tokens and not sequence.params.pools
        draft.chunks.append(Chunk(sequence, start, stop, samples))
        if self._waiting or sequence.followers:  # else that can pass beside the step
            self._publish(draft, draft.chunks[-1])

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
        if len(draft.num_drafts):
            for sequence, num_drafts in zip(draft.decodes, draft.num_drafts.tolist(), strict=True):
                sequence.num_scheduled_tokens += num_drafts
                sequence.num_drafts += num_drafts
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
