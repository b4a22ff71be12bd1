"""A scheduler by hand: tests say which rows a step has, it keeps pages and writes the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from common.messages.sampling import SamplingParams
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.protocol import Runner
from services.compute.step import DEVICE_TOKEN, SlotDelta, StepPlan, StepResult, int32_array

GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)


@dataclass(slots=True)
class Sequence:
    """One sequence as the plan knows it: `computed` positions are in its pages.

    `pages` has one of each cache group, then the next ones.
    """

    slot: int
    prompt: list[int]
    sampling: SamplingParams
    choice: int = 0
    stop_ids: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    output: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    loading: tuple[object] | None = None  # the ticket of its pages' way back
    placed: bool = False


class HandScheduler:
    """Runs steps of named rows on a runner; every method is one decision of a real scheduler."""

    def __init__(self, runner: Runner, page_tokens: int, scatter: bool = True) -> None:
        self.runner = runner
        self.page_tokens = page_tokens
        spec = runner.spec()
        self.num_groups = len(spec.kv_groups)
        self.free_pages = list(range(spec.num_pages))
        if scatter:  # neighbours in a sequence are not neighbours in memory
            np.random.default_rng(3).shuffle(self.free_pages)
        self.free_host_pages = list(range(spec.num_host_pages))
        self.leaving: list[tuple[object, list[int]]] = []  # tickets, pages free behind them
        self.sequences: list[Sequence] = []
        self.step_id = 0
        self.results: list[StepResult] = []

    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        output: list[int] | None = None,
        shared: tuple[Sequence, int] | None = None,
        **settings: object,
    ) -> Sequence:
        """A sequence in the next slot; `shared` gives it full pages of another one's, which may
        have its first row in the same step."""
        sequence = Sequence(len(self.sequences), list(prompt), sampling, **settings)  # type: ignore[arg-type]
        sequence.output = list(output or [])
        if shared is not None:
            other, num_pages = shared
            while len(other.pages) < num_pages * self.num_groups:
                other.pages.append(self.free_pages.pop())
            sequence.pages = other.pages[: num_pages * self.num_groups]
            sequence.computed = num_pages * self.page_tokens
        self.sequences.append(sequence)
        return sequence

    def step(
        self, *rows: tuple[Sequence, int], swap_out: tuple[Sequence, ...] = ()
    ) -> StepResult | None:
        """One step: (sequence, queries) each, 1 query past the prompt being a decode row."""
        result = self.finish(self.launch(*rows, swap_out=swap_out))
        return result

    def launch(
        self, *rows: tuple[Sequence, int], swap_out: tuple[Sequence, ...] = ()
    ) -> tuple[object, list[Sequence]]:
        """Forward and sample a step; its tokens are on the device only."""
        decode = [r for r in rows if self._is_decode(*r)]
        ordered = decode + [r for r in rows if not self._is_decode(*r)]
        self._end_transfers()
        for sequence in swap_out:
            self.swap_out(sequence)
        deltas = []
        slots, q_start, q_len, tokens, sample_row, sample_index, entries = (
            [],
            [],
            [],
            [],
            [],
            [],
            [],
        )
        sampled: list[Sequence] = []
        for number, (sequence, queries) in enumerate(ordered):
            self._load(sequence)
            if not sequence.placed:
                deltas.append(self._delta(sequence))
                entries += self._entries(sequence, 0)
                sequence.placed = True
            known = sequence.prompt + sequence.output
            start, end = sequence.computed, sequence.computed + queries
            num_before = len(sequence.pages)
            while len(sequence.pages) * self.page_tokens < end * self.num_groups:
                sequence.pages += [self.free_pages.pop() for _ in range(self.num_groups)]
            entries += self._entries(sequence, num_before)
            slots.append(sequence.slot)
            q_start.append(start)
            q_len.append(queries)
            tokens += known[start:end]
            sequence.computed = end
            if end == len(known):
                sample_row.append(number)
                sample_index.append(len(sequence.output))
                sequence.output.append(DEVICE_TOKEN)
                sampled.append(sequence)
        self.step_id += 1
        table = np.array(entries, dtype=np.int32).reshape(-1, 4)
        plan = StepPlan(
            step_id=self.step_id,
            num_decode_rows=len(decode),
            row_slot=np.array(slots, dtype=np.int32),
            row_epoch=np.zeros(len(slots), dtype=np.int32),
            q_start=np.array(q_start, dtype=np.int32),
            q_len=np.array(q_len, dtype=np.int32),
            pos_upper=np.array(q_start, dtype=np.int32) + np.array(q_len, dtype=np.int32),
            tokens=np.array(tokens, dtype=np.int32),
            sample_row=np.array(sample_row, dtype=np.int32),
            sample_index=np.array(sample_index, dtype=np.int32),
            page_slot=table[:, 0],
            page_index=table[:, 1],
            page_id=table[:, 2],
            page_group=table[:, 3],
            slots=tuple(deltas),
        )
        return self.runner.sample(self.runner.forward(plan)), sampled

    def finish(self, launched: tuple[object, list[Sequence]]) -> StepResult:
        """Take a step's tokens into the sequences."""
        ticket, sampled = launched
        result = self.runner.result(ticket)
        for sequence, token in zip(sampled, result.tokens[:, 0].tolist(), strict=True):
            sequence.output[sequence.output.index(DEVICE_TOKEN)] = token
        self.results.append(result)
        return result

    def run(self, sequence: Sequence, count: int, chunk: int = 10_000) -> list[int]:
        """Alone until it has `count` output tokens: prefill in chunks, then decode."""
        while len(sequence.output) < count:
            self.step((sequence, self.next_queries(sequence, chunk)))
        return sequence.output[:count]

    def run_all(self, count: int, chunk: int = 10_000) -> None:
        """All sequences in every step, each prefilling in chunks, until each has `count`."""
        while open_ones := [s for s in self.sequences if len(s.output) < count]:
            self.step(*((s, self.next_queries(s, chunk)) for s in open_ones))

    @staticmethod
    def next_queries(sequence: Sequence, chunk: int) -> int:
        """How many positions the sequence's next row computes."""
        return min(chunk, len(sequence.prompt) + len(sequence.output) - sequence.computed)

    @staticmethod
    def _is_decode(sequence: Sequence, queries: int) -> bool:
        known = len(sequence.prompt) + len(sequence.output)
        return queries == 1 and sequence.computed + 1 == known

    @staticmethod
    def _delta(sequence: Sequence) -> SlotDelta:
        return SlotDelta(
            slot=sequence.slot,
            epoch=0,
            sampling=sequence.sampling,
            choice=sequence.choice,
            stop_ids=sequence.stop_ids,
            prompt_ids=int32_array(sequence.prompt),
            output_ids=int32_array(sequence.output),
        )

    def swap_out(self, sequence: Sequence) -> None:
        """Begin a sequence's way to the host; its pages are free when it is over."""
        taken = [self.free_host_pages.pop() for _ in sequence.pages]
        pages = PagePairs(int32_array(sequence.pages), int32_array(taken))
        ticket = self.runner.transfer(Direction.TO_HOST, pages)
        self.leaving.append((ticket, sequence.pages))
        sequence.host_pages = taken
        sequence.pages = []
        sequence.placed = False

    def swap_in(self, sequence: Sequence) -> None:
        """Begin its way back; steps with a row of it wait for the end."""
        taken = [self.free_pages.pop() for _ in sequence.host_pages]
        pages = PagePairs(int32_array(sequence.host_pages), int32_array(taken))
        sequence.loading = (self.runner.transfer(Direction.TO_DEVICE, pages),)
        sequence.pages = taken

    def _load(self, sequence: Sequence) -> None:
        if not sequence.host_pages:
            return
        if sequence.loading is None:
            self.swap_in(sequence)
        (ticket,) = sequence.loading
        while not self.runner.transferred(ticket):
            pass
        self.free_host_pages += sequence.host_pages
        sequence.host_pages, sequence.loading = [], None

    def _end_transfers(self) -> None:
        """Free the pages that have been copied to the host."""
        leaving, self.leaving = self.leaving, []
        for ticket, pages in leaving:
            if self.runner.transferred(ticket):
                self.free_pages = pages + self.free_pages
            else:
                self.leaving.append((ticket, pages))

    def _entries(self, sequence: Sequence, first: int) -> list[tuple[int, int, int, int]]:
        """Of the page tables, for a sequence's pages from this one on."""
        slot, num_groups = sequence.slot, self.num_groups
        return [
            (slot, number // num_groups, page, number % num_groups)
            for number, page in enumerate(sequence.pages[first:], first)
        ]
