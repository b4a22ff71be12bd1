"""Ranks of kernels as threads that take turns: the interpreter knows one launch at a time.

What goes from rank to rank by memory here is a launch's work on a GPU (test_rank_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import BrokenBarrierError, Lock
from typing import Any

import torch
from torch import Tensor

from services.compute.config import ComputeSettings
from services.compute.distributed.stages import ONE_STAGE, Stages
from services.compute.expert_counters import ExpertCounters
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.sampling.sample import SampleScratch, VocabularyPart
from services.compute.kernels.step.step_buffers import NUM_OWN, NUM_SAMPLES, NUM_TOKENS
from services.compute.layers.kernel_attention import KernelAttention
from services.compute.layers.kernel_context import (
    ONE_CONTEXT,
    ContextSizes,
    KernelContext,
    SharedAttention,
)
from services.compute.layers.kernel_ranks import KernelRanks, OneRank, RankSizes
from services.compute.runner.context_executor import ContextExecutor
from services.compute.runner.cuda.executor import CudaExecutor
from services.compute.runner.cuda.load import load_on
from services.compute.runner.executor import Executor, UploadKind
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.protocol import RunnerSpec
from services.compute.step import Int32Array, StepResult
from tests.kernels.host_stream import HostStream
from tests.kernels.runner.cuda_runners import load_runner
from tests.unit.compute.distributed.rank_threads import Meeting, ThreadRanks


class Turns(Meeting):
    """A meeting of threads of which one runs at a time; who waits lets the others run."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.turn = Lock()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.turn.release()
        try:
            return super().exchange(rank, value)
        finally:
            self.turn.acquire()


class ThreadKernelRanks:
    """`KernelRanks` of threads."""

    is_split = True

    def __init__(self, ranks: ThreadRanks, sizes: RankSizes, delta_TE: Tensor) -> None:
        self._ranks = ranks
        self._delta_TE = torch.zeros(sizes.max_rows, sizes.width, dtype=sizes.dtype)
        self._adds_pairs = sizes.top_k > 0
        begins = sizes.logit_begins
        self._draws_parts = not any(begin % 4 for begin in begins[:-1])
        self._begin = begins[ranks.rank]
        width = begins[ranks.rank + 1] - self._begin
        self._logits_SV = torch.zeros(sizes.max_samples, width)

    def begin(self) -> None:
        pass

    def room(self, num_tokens: int) -> Tensor:
        return self._delta_TE[:num_tokens]

    def added_up(self, delta_TE: Tensor) -> Tensor:
        assert delta_TE.data_ptr() == self._delta_TE.data_ptr()
        self._ranks.add_up(delta_TE)
        return delta_TE

    def pairs_room(self, num_tokens: int, num_pairs: int) -> Tensor | None:
        rows_RE = self._delta_TE[num_tokens : num_tokens + num_pairs]
        return rows_RE if self._adds_pairs else None

    def add_up_pairs(self, num_tokens: int, num_pairs: int) -> None:
        self._ranks.add_up(self._delta_TE[: num_tokens + num_pairs])

    def end(self) -> None:
        pass

    def logits_room(self, logits_SV: Tensor) -> Tensor:
        return self._logits_SV[: len(logits_SV)]

    def vocabulary_part(self, num_samples: int) -> VocabularyPart | None:
        return VocabularyPart(self._begin, self._share) if self._draws_parts else None

    def _share(self, scratch: SampleScratch, num_samples: int, num_parts: int) -> int:
        for mine_SC in scratch:
            parts_SC = mine_SC[:num_samples, :num_parts].clone()
            all_SC = torch.cat(self._ranks.exchange(parts_SC), 1)
            mine_SC[:num_samples, : all_SC.shape[1]] = all_SC
        return all_SC.shape[1]

    def agree(self, words_NW: Tensor) -> None:
        words_NW.copy_(self._ranks.of_first(words_NW))

    def complete(self, logits_SV: Tensor) -> None:
        part_SV = self._logits_SV[: len(logits_SV)].clone()
        logits_SV.copy_(self._ranks.side_by_side(part_SV, logits_SV.shape[1]))


class ThreadContext:
    """`KernelContext` of threads."""

    def __init__(self, ranks: ThreadRanks, header: Tensor) -> None:
        self._ranks = ranks
        self._header = header

    def shared(self, attention: KernelAttention) -> KernelAttention:
        return SharedAttention(attention, self._exchange)

    def agree(self, x_SE: Tensor) -> None:
        x_SE.copy_(self._ranks.exchange(x_SE.clone())[0])

    def _exchange(self, pages: LayerPages, kv_slots_T: Tensor) -> None:
        last, num_own = self._header[[NUM_TOKENS, NUM_OWN]].tolist()
        slots = kv_slots_T[last - num_own : last]
        page_tokens = pages.entries.shape[3]
        own = slots // page_tokens, slice(None), slice(None), slots % page_tokens
        for part in pages:
            if part is not None:
                theirs = self._ranks.exchange((own, part[own].clone()))
                for place, entries in theirs:
                    part[place] = entries


def thread_context(ranks: Any, sizes: ContextSizes, header: Tensor) -> KernelContext:
    """In place of `kernel_context`, which has that of GPUs."""
    return ONE_CONTEXT if ranks.size == 1 else ThreadContext(ranks, header)


def thread_ranks(ranks: Any, sizes: RankSizes, delta_TE: Tensor) -> KernelRanks:
    """In place of `kernel_ranks`, which has those of GPUs."""
    return OneRank(delta_TE) if ranks.size == 1 else ThreadKernelRanks(ranks, sizes, delta_TE)


class SplitExecutor:
    """Ranks that make each call, one in each of as many threads."""

    def __init__(
        self,
        folder: Path,
        settings: ComputeSettings,
        device: torch.device,
        size: int = 2,
        stages: Sequence[Stages] = (),
    ) -> None:
        """`stages`: as each of the ranks sees them."""
        self._turns = turns = Turns(size)
        self._pool = ThreadPoolExecutor(turns.size)

        def load(rank: int) -> CudaExecutor:
            ranks = ThreadRanks(rank, turns)
            own = stages[rank] if stages else ONE_STAGE
            return load_on(folder, settings, device, HostStream(), ranks, own)

        executors: list[CudaExecutor] = self._all(load)
        self._machines = [each._machine for each in executors]
        self._machine = self._machines[0]
        self._ranks: list[Executor] = [*executors]
        if settings.prefill_context_parallel_size > 1:
            self._ranks = [ContextExecutor(each, n, size) for n, each in enumerate(executors)]

    def _all(self, call: Callable[[int], Any]) -> list[Any]:
        @torch.inference_mode()
        def run(rank: int) -> Any:
            with self._turns.turn:
                try:
                    return call(rank)
                except Exception:
                    self._turns.end()
                    raise

        called = [self._pool.submit(run, rank) for rank in range(self._turns.size)]
        errors = [error for each in called if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [each.result() for each in called]

    def spec(self) -> RunnerSpec:
        return self._ranks[0].spec()

    def buffer(self, kind: UploadKind) -> Int32Array:
        return self._ranks[0].buffer(kind)

    def _send(self, kind: UploadKind, num_ints: int) -> None:
        for rank in self._ranks[1:]:
            rank.buffer(kind)[:num_ints] = self._ranks[0].buffer(kind)[:num_ints]

    def enter(self, num_ints: int) -> None:
        self._send(UploadKind.ENTRIES, num_ints)
        self._all(lambda rank: self._ranks[rank].enter(num_ints))

    def forward(self, num_ints: int) -> list[Any]:
        self._send(UploadKind.STEP, num_ints)
        return self._all(lambda rank: self._forward(self._ranks[rank], num_ints))

    @staticmethod
    def _forward(executor: Executor, num_ints: int) -> Any:
        ticket = executor.forward(num_ints)
        while not executor.go_on(ticket):  # until its stage has what the one before has made
            pass
        return ticket

    def go_on(self, tickets: list[Any]) -> bool:
        return True

    def sample(self, tickets: list[Any], num_ints: int) -> list[Any]:
        """Tokens are drawn from parts; logits are made once more, as a whole, to be looked at."""
        sampled = self._all(lambda rank: self._ranks[rank].sample(tickets[rank], num_ints))
        if num_samples := tickets[0].header[NUM_SAMPLES]:
            self._all(lambda rank: self._machines[rank]._model.logits(num_samples))
        return sampled

    def result(self, tickets: list[Any]) -> StepResult:
        results = self._all(lambda rank: self._ranks[rank].result(tickets[rank]))
        for machine, result in zip(self._machines[1:], results[1:], strict=True):
            assert result.tokens.tolist() == results[0].tokens.tolist()
            logits_SV = machine._decoder.logits_SV
            assert torch.equal(logits_SV, self._machine._decoder.logits_SV)
        return results[0]

    def ready(self, tickets: list[Any]) -> bool:
        return True

    def expert_counters(self) -> ExpertCounters | None:
        return self._ranks[0].expert_counters()

    def close(self) -> None:
        self._all(lambda rank: self._ranks[rank].close())


def load_split(
    folder: Path, settings: ComputeSettings, device: torch.device, size: int
) -> PackingRunner:
    """The runner of a folder on so many ranks; of one it is any test's."""
    if size == 1:
        return load_runner(folder, settings, device)
    return PackingRunner(SplitExecutor(folder, settings, device, size))
