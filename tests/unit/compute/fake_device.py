"""A device for tests that shows every mistake in page accounting as a wrong token.

It keeps paged KV memory as plain lists. What it stores at a position is the token, the hash of
all tokens up to there, and the cache group. In every group a row reads the positions before its own
that it sees, as attention does, and checks that they belong together; and the token it samples
depends on all of them. So a page that was lost, overwritten or shared wrongly fails an assertion
at the read, or gives a wrong token. What is in a page that has no owner is gone.

A transfer copies when it is finished, as late as it can: until then no row may write to a page that
it reads, nor use one that it writes, and no other transfer may write to either.

Behind the token of a decode row it puts drafts, as far as the plan allows, of which some are right:
chance follows from the prefix, so that a history always runs alike.

What a row reads was written in an earlier step, or is written in the same step by another row:
in every layer of a model all rows store their keys before any of them attends. Here, where a row
is computed at once, that other row is taken first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np

from common.messages.tokens import TokenLogprobs
from services.compute.kv.memory import KVGroup
from services.compute.kv.transfer import Direction
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.transfers import Transfer
from services.compute.step import (
    DEVICE_TOKEN,
    Float32Array,
    RowScores,
    ScoreRow,
    StepPlan,
    StepResult,
)
from tests.spans import Sizes, spans_of
from tests.unit.compute.fake_slot import Slot
from tests.unit.compute.fake_texts import (
    EOS,
    embedding_of,
    extend,
    next_token,
    score_of,
)

Page = list[tuple[int, int, int]]
EMPTY = (-1, 0, -1)  # (token, prefix hash, group) of a position that was never written
DAMAGED = (-7, 0, -1)  # what a broken step leaves behind: a row that reads it computes nonsense


def make_groups(windows: Sizes, page_tokens: int = 4) -> tuple[KVGroup, ...]:
    """Cache groups by their windows or spans; 0 is one that sees all positions."""
    kinds: dict[bool, Literal["full", "window"]] = {True: "full", False: "window"}
    spans = spans_of(windows)
    return tuple(KVGroup(kinds[span.is_full], 1, page_tokens, 1, span) for span in spans)


def make_spec(pooling: str = "", windows: Sizes = (0,), **changes: int) -> RunnerSpec:
    """A small runner: pages of 4 tokens, a vocabulary of 32 ids, one group that sees everything."""
    page_tokens = changes.pop("page_tokens", 4)
    values: dict[str, int] = {
        "vocab_size": 32,
        "max_model_len": 256,
        "num_pages": 64,
        "num_host_pages": 0,
        "max_num_seqs": 8,
        "max_step_tokens": 64,
    }
    values.update(changes)
    return RunnerSpec(
        eos_token_ids=(EOS,),
        kv_groups=make_groups(windows, page_tokens),
        stall_after_s=1.0,
        pooling=pooling,
        **values,  # type: ignore[arg-type]
    )


class FakeDevice:
    """Runs plans in the order launched; results can be taken later, in the same order."""

    def __init__(self, spec: RunnerSpec) -> None:
        self.spec = spec
        self.page_tokens = spec.kv_groups[0].page_tokens
        self.spans = [group.span for group in spec.kv_groups]
        self.unowned: Iterable[int] = ()  # pages that no row of the next step may read
        self.returned: frozenset[int] = frozenset()  # such that a transfer still reads or writes
        self.transfers: list[tuple[Transfer, list[Page]]] = []  # with what they should read
        self.pages = [[EMPTY] * self.page_tokens for _ in range(spec.num_pages)]
        self.host = [[EMPTY] * self.page_tokens for _ in range(spec.num_host_pages)]
        self.slots: dict[int, Slot] = {}
        self.nonfinite_seeds: set[int] = set()
        self.num_swapped_out = 0
        self.num_reads_of_same_step = 0  # rows that waited for another one's writes
        self.last_step_id = -1

    def run(
        self, plan: StepPlan, damaged: bool = False, skipped: frozenset[int] = frozenset()
    ) -> StepResult:
        """Execute one plan; a damaged step computes nonsense, which its result does not show.

        Void samples draw nothing: their slots have no last token then.
        """
        assert plan.step_id > self.last_step_id, "plans are numbered in their order"
        self.last_step_id = plan.step_id
        for delta in plan.slots:
            old = self.slots.get(delta.slot)
            assert old is None or delta.epoch > old.delta.epoch, "a slot's epoch only grows"
            self.slots[delta.slot] = Slot(delta, outputs=delta.output_ids.tolist())
        for page in self.unowned:
            self.pages[page] = [EMPTY] * self.page_tokens
        self.unowned = ()
        groups = plan.page_group if len(plan.page_group) else np.zeros_like(plan.page_id)
        columns = (plan.page_slot, groups, plan.page_index, plan.page_id)
        for slot, group, index, page in zip(*(c.tolist() for c in columns), strict=True):
            assert 0 <= group < len(self.spans)
            self.slots[slot].pages[group, index] = page
        self._check_shape(plan)
        self._check_drafts(plan)
        self._check_owners(plan)
        prefixes = self._forward(plan, damaged)
        result = self._sample(plan, prefixes, skipped)
        for score in plan.scores:
            result.scores[score.row] = self._score(plan, prefixes[score.row], score)
        for pool in plan.pools:
            embedding = self._pool(plan, prefixes[pool.row], pool.row)
            if pool.ends:
                result.embeddings[pool.row] = embedding
        return result

    def transfer(self, transfer: Transfer) -> None:
        """Begin a transfer: what it will write is as good as gone."""
        sources, targets = (pages.tolist() for pages in transfer.pages)
        assert all(pages.dtype == np.int32 for pages in transfer.pages)
        to_host = transfer.direction is Direction.TO_HOST
        source, target = (self.pages, self.host) if to_host else (self.host, self.pages)
        assert len(set(targets)) == len(targets) == len(sources) > 0
        is_free = self.under_way(target is self.host).isdisjoint(targets)
        assert is_free, "a transfer writes to a page of another one"
        for page in targets:
            target[page] = [EMPTY] * self.page_tokens
        self.num_swapped_out += len(sources) * to_host
        self.transfers.append((transfer, [list(source[page]) for page in sources]))

    def finish_transfer(self) -> Transfer:
        """Copy what the oldest transfer is about."""
        (transfer, contents), *self.transfers = self.transfers
        to_host = transfer.direction is Direction.TO_HOST
        source, target = (self.pages, self.host) if to_host else (self.host, self.pages)
        columns = (transfer.pages.sources.tolist(), transfer.pages.targets.tolist(), contents)
        for first, to, content in zip(*columns, strict=True):
            # Pages on the host may just have been written by a transfer that began before.
            assert source[first] == content or not to_host, "a page changed under a transfer"
            target[to] = list(source[first])
        return transfer

    def under_way(self, on_host: bool, written: bool | None = None) -> set[int]:
        """The pages of one memory that transfers read or write, or of these one alone."""
        pages: set[int] = set()
        for transfer, _ in self.transfers:
            is_written = (transfer.direction is Direction.TO_HOST) is on_host
            if written in (None, is_written):
                sources, targets = transfer.pages
                pages.update((targets if is_written else sources).tolist())
        return pages

    def _check_shape(self, plan: StepPlan) -> None:
        rows = plan.num_rows
        assert 0 < plan.num_tokens <= self.spec.max_step_tokens
        assert plan.num_tokens == plan.q_len.sum()
        assert len(set(plan.row_slot.tolist())) == rows, "a slot has one row"
        assert (plan.q_len[: plan.num_decode_rows] == 1).all()
        assert (plan.sample_row[: plan.num_decode_rows] == np.arange(plan.num_decode_rows)).all()
        sampled = set(plan.sample_row.tolist())
        for row in range(plan.num_decode_rows, rows):
            assert plan.q_len[row] > 1 or row not in sampled, "a decode row among the chunks"
        assert (plan.pos_upper == plan.q_start + plan.q_len).all()
        for column in (plan.row_slot, plan.tokens, plan.q_start, plan.sample_index, plan.page_id):
            assert column.dtype == np.int32
        assert plan.page_group.dtype == np.int32
        assert len(plan.page_group) == len(plan.page_id) or len(self.spans) == 1

    def _check_drafts(self, plan: StepPlan) -> None:
        num_more = int(plan.num_drafts.sum())
        assert plan.num_tokens + num_more <= self.spec.max_step_tokens
        assert plan.num_rows + num_more <= self.spec.max_num_seqs
        if not len(plan.num_drafts):
            return
        assert len(plan.num_drafts) == plan.num_decode_rows and plan.num_drafts.dtype == np.int32
        assert 0 <= plan.num_drafts.min() and plan.num_drafts.max() <= self.spec.max_drafts
        for row, num_drafts in enumerate(plan.num_drafts.tolist()):
            delta = self.slots[int(plan.row_slot[row])].delta
            is_forced = delta.sampling.grammar_spec is not None
            assert not (delta.drafts and is_forced)
            if num_drafts:
                in_stages = self.spec.num_stages > 1
                assert (plan.tokens[row] == DEVICE_TOKEN) != in_stages
                assert delta.drafts or is_forced
                if is_forced or in_stages:
                    assert (plan.given_drafts[row, :num_drafts] >= 0).all()

    def _positions(self, plan: StepPlan, row: int) -> tuple[int, int]:
        """The first position of a row, and the one behind the last that it may have."""
        start, stop = int(plan.q_start[row]), int(plan.pos_upper[row])
        slot = self.slots[int(plan.row_slot[row])]
        if row < plan.num_decode_rows and plan.tokens[row] == DEVICE_TOKEN and slot.delta.drafts:
            assert slot.length <= start, "the host is wrong about a slot's length"
            start, stop = slot.length, slot.length + 1
        if row < len(plan.num_drafts):
            stop += int(plan.num_drafts[row])
        return start, stop

    def _check_owners(self, plan: StepPlan) -> None:
        """A page that rows of this step use is one group's, and at one place in all of them."""
        owners: dict[int, tuple[int, int]] = {}
        arriving = self.under_way(on_host=False, written=True)
        for row, slot in enumerate(plan.row_slot.tolist()):
            start, stop = self._positions(plan, row)
            for group in range(len(self.spans)):
                first = self.spans[group].first_position(start) // self.page_tokens
                for index in range(first, -(-stop // self.page_tokens)):
                    page = self.slots[slot].pages[group, index]
                    assert page not in arriving, "a row uses a page that is not there yet"
                    assert page not in self.returned, "a row uses a page that was given back"
                    owner = owners.setdefault(page, (group, index))
                    assert owner == (group, index), f"page {page} has two owners"

    def _forward(self, plan: StepPlan, damaged: bool) -> list[list[int]]:
        """Write the rows' positions; return each row's prefix hashes, one after each token."""
        prefixes: list[list[int]] = [[] for _ in range(plan.num_rows)]
        token_start = (np.cumsum(plan.q_len) - plan.q_len).tolist()
        written: dict[tuple[int, int], int] = {}
        leaving = self.under_way(on_host=False, written=False)
        for row in self._rows_in_order(plan):
            slot = self.slots[int(plan.row_slot[row])]
            assert slot.delta.epoch == plan.row_epoch[row], "the row is of a former owner"
            start, stop = self._positions(plan, row)
            length = int(plan.q_len[row])
            prefix = DAMAGED[0] if damaged else self._read(slot, start)
            slot.valid, slot.num_offered = [], 0
            for position in range(start, stop):
                if position < start + length:
                    token = int(plan.tokens[token_start[row] + position - start])
                else:
                    draft = slot.draft(prefix, _given(plan, row, position - start - length))
                    if draft is None:
                        break
                    token = draft
                if token == DEVICE_TOKEN:
                    assert slot.last is not None, "there is no sampled token in this slot"
                    assert slot.length == position, "the host is wrong about a slot's length"
                    token = slot.last
                elif position < start + length:
                    index = int(plan.sample_index[row]) if row < plan.num_decode_rows else -1
                    slot.last, slot.length, slot.index = token, position, index
                prefix = extend(prefix, token)
                prefixes[row].append(prefix)
                for group in range(len(self.spans)):
                    place = page, offset = self._place(slot, group, position)
                    assert page not in leaving, "a row writes to a page that is still read"
                    assert written.setdefault(place, prefix) == prefix, "two rows, one place"
                    self.pages[page][offset] = DAMAGED if prefix < 0 else (token, prefix, group)
        return prefixes

    def _rows_in_order(self, plan: StepPlan) -> list[int]:
        """The rows, each after those that write what it reads."""
        if plan.num_rows == 1:
            return [0]
        reads, writes = [], []
        for row in range(plan.num_rows):
            slot = self.slots[int(plan.row_slot[row])]
            start, stop = self._positions(plan, row)
            row_reads, row_writes = set(), set()
            for group in range(len(self.spans)):
                seen = range(self.spans[group].first_position(start), start)
                row_reads |= {self._place(slot, group, position) for position in seen}
                row_writes |= {self._place(slot, group, p) for p in range(start, stop)}
            reads.append(row_reads)
            writes.append(row_writes)
        order: list[int] = []
        waiting = list(range(plan.num_rows))
        while waiting:
            unwritten = [writes[row] for row in waiting]
            ready = [row for row in waiting if all(map(reads[row].isdisjoint, unwritten))]
            assert ready, "rows wait for each other"
            order += ready
            waiting = [row for row in waiting if row not in ready]
            self.num_reads_of_same_step += len(waiting)
        return order

    def _place(self, slot: Slot, group: int, position: int) -> tuple[int, int]:
        return slot.pages[group, position // self.page_tokens], position % self.page_tokens

    def _read(self, slot: Slot, length: int) -> int:
        """Read what a query behind `length` positions of a slot sees of them in every group.

        Returns the hash of all their tokens, also of those that no group sees any more.
        """
        prefixes = {self._read_group(slot, group, length) for group in range(len(self.spans))}
        if DAMAGED[0] in prefixes:
            return DAMAGED[0]
        prefixes.discard(None)
        assert prefixes, "windows of one position show nothing"
        assert len(prefixes) == 1, "groups hold different tokens"
        return prefixes.pop() or 0

    def _read_group(self, slot: Slot, group: int, length: int) -> int | None:
        first = self.spans[group].first_position(length)
        prefix = 0 if first == 0 else None
        pages, page_tokens = slot.pages, self.page_tokens  # long texts have millions of these
        for position in range(first, length):
            page = self.pages[pages[group, position // page_tokens]]
            token, stored, owner = page[position % page_tokens]
            if (token, stored, owner) == DAMAGED:
                return DAMAGED[0]
            assert owner == group, f"position {position} is not of group {group}"
            if prefix is not None:
                wrong = f"position {position} holds another sequence's tokens"
                assert extend(prefix, token) == stored, wrong
            prefix = stored
        return prefix

    def _score(self, plan: StepPlan, prefixes: list[int], score: ScoreRow) -> RowScores:
        """Each target's logprob, and as many of the likeliest as asked: those after the target."""
        count = len(score.targets)
        assert 0 < count <= plan.q_len[score.row]
        targets = score.targets.tolist()
        logprobs = [score_of(*pair) for pair in zip(prefixes, targets, strict=False)]
        if self._is_nonfinite(plan, score.row):
            logprobs[-1] = float("nan")
        top_ids = [[(t + k) % 32 for k in range(score.num_top)] for t in targets]
        ids = np.array(top_ids, dtype=np.int32).reshape(count, score.num_top)
        ranks = np.array(targets, dtype=np.int32) + 1
        return RowScores(np.array(logprobs, dtype=np.float32), ranks, ids, ids.astype(np.float32))

    def _pool(self, plan: StepPlan, prefixes: list[int], row: int) -> Float32Array:
        """Count what was looked at; where the last position is enough, it is one."""
        slot = self.slots[int(plan.row_slot[row])]
        if plan.q_start[row] == 0:
            slot.num_pooled = 0
        slot.num_pooled += len(prefixes)
        num_pooled = 1 if self.spec.pooling == "last" else slot.num_pooled
        embedding = embedding_of(prefixes[-1], num_pooled)
        if self._is_nonfinite(plan, row):
            embedding[0] = float("inf")
        return np.array(embedding, dtype=np.float32)

    def _is_nonfinite(self, plan: StepPlan, row: int) -> bool:
        seed = self.slots[int(plan.row_slot[row])].delta.sampling.seed
        return seed in self.nonfinite_seeds

    def _sample(
        self, plan: StepPlan, prefixes: list[list[int]], skipped: frozenset[int]
    ) -> StepResult:
        count = len(plan.sample_row)
        tokens = np.zeros((count, 1 + self.spec.max_drafts), dtype=np.int32)
        valid = np.ones(count, dtype=np.int32)
        nonfinite = np.zeros(count, dtype=np.bool_)
        offered, found = np.zeros((2, count), dtype=np.int32)
        drafts = np.full((count, self.spec.max_drafts), -1, dtype=np.int32)
        logprobs = {}
        for sample, (row, index) in enumerate(zip(plan.sample_row, plan.sample_index, strict=True)):
            slot = self.slots[int(plan.row_slot[row])]
            sampling = slot.delta.sampling
            slot.take_index(int(index))
            if sample in skipped:
                nonfinite[sample] = sampling.seed in self.nonfinite_seeds
                continue
            drawn = slot.valid.copy()  # right drafts, and the token behind the last of them
            prefix = prefixes[row][len(drawn) if row < plan.num_decode_rows else -1]
            index = slot.index + len(drawn)
            outputs = [*slot.outputs, *drawn]
            drawn.append(next_token(prefix, index, sampling, slot.delta, outputs))
            slot.last, slot.length = drawn[-1], slot.length + len(drawn)
            slot.index += len(drawn)
            slot.outputs += drawn
            tokens[sample, : len(drawn)] = drawn
            valid[sample], offered[sample] = len(drawn), slot.num_offered
            found[sample] = self.spec.max_drafts * slot.delta.drafts
            if self.spec.num_stages > 1:
                said = slot.guesses(extend(prefix, drawn[-1]), int(found[sample]))
                found[sample], drafts[sample, : len(said)] = len(said), said
            if sampling.seed in self.nonfinite_seeds:
                nonfinite[sample], valid[sample] = True, 0
            if sampling.num_logprobs >= 0:
                logprobs[sample] = tuple(TokenLogprobs(-float(token)) for token in drawn)
        result = StepResult(plan.step_id, tokens, valid, nonfinite, logprobs)
        result = replace(result, num_offered=offered, num_found=found, found_by=0 * found)
        return replace(result, drafts=drafts)


def _given(plan: StepPlan, row: int, number: int) -> int:
    given_QK = plan.given_drafts
    is_given = len(given_QK) and number < given_QK.shape[1]
    return int(given_QK[row, number]) if is_given else DEVICE_TOKEN
