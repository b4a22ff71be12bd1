"""The ranks of a model as threads of one process: what they exchange lies in a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from services.compute.config import ComputeSettings
from services.compute.distributed.ranks import Ranks
from services.compute.expert_counters import ExpertCounters
from services.compute.kernels.ranks.tree_sum import tree_sum
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.eager import EagerTicket
from services.compute.runner.executor import Executor, UploadKind
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.registry import load_executor
from services.compute.step import Int32Array, StepResult

PATIENCE_S = 60.0


class Meeting:
    """Where so many threads meet, each with something, and leave with what all of them had."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = Barrier(size, timeout=PATIENCE_S)
        self._brought: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What all ranks brought, in their order."""
        self._brought[rank] = value
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()  # nobody brings the next before all have seen these
        return brought

    def end(self) -> None:
        """Whoever waits gets an error."""
        self._barrier.abort()


class ThreadRanks:
    """One of them; it sums as `Ranks` says."""

    store = None

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self._meeting = rank, meeting

    @property
    def size(self) -> int:
        return self._meeting.size

    def exchange(self, value: Any) -> list[Any]:
        """What all ranks have, in their order."""
        return self._meeting.exchange(self.rank, value)

    def add_up(self, x: Tensor) -> None:
        x.copy_(tree_sum(self.exchange(x.clone())))

    def side_by_side(self, x: Tensor, width: int) -> Tensor:
        whole = torch.cat(self._meeting.exchange(self.rank, x), dim=-1)
        assert whole.shape[-1] == width
        return whole

    def below_one_another(self, x_TX: Tensor) -> Tensor:
        return torch.cat(self.exchange(x_TX.clone()))

    def of_first(self, x: Tensor) -> Tensor:
        return self.exchange(x.clone())[0].clone()

    def least(self, value: int) -> int:
        return min(self._meeting.exchange(self.rank, value))

    def close(self) -> None:
        pass


class ThreadLink:
    """An `ExpertLink` of threads."""

    def __init__(self, num_bytes: int, device: torch.device, ranks: ThreadRanks) -> None:
        self._ranks = ranks

    def hand_on(self, pieces: Sequence[Tensor], source: int, target: int) -> None:
        handed = self._ranks.exchange([piece.clone() for piece in pieces])[source]
        if self._ranks.rank == target:
            for piece, copy in zip(pieces, handed, strict=True):
                piece.copy_(copy)


class RankThreads:
    """The executor of rank 0; the others get the same uploads, each in a thread of its own."""

    def __init__(self, folder: Path, settings: ComputeSettings, size: int) -> None:
        self._meeting = Meeting(size)
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        self._told: list[Future[Any]] = []

        def load(rank: int) -> Executor:
            ranks: Ranks = ThreadRanks(rank, self._meeting)
            return load_executor(folder, settings, ranks)

        loads = [self._start(rank, load, rank) for rank in range(size)]
        self.executors = [each.result() for each in loads]
        self._leader = self.executors[0]
        self._tickets: list[Any] = [None] * size
        self.tokens: list[list[Int32Array]] = [[] for _ in range(size)]  # of each rank
        self.logits: list[list[Tensor]] = [[] for _ in range(size)]

    def spec(self) -> RunnerSpec:
        return self._leader.spec()

    def buffer(self, kind: UploadKind) -> Int32Array:
        return self._leader.buffer(kind)

    def enter(self, num_ints: int) -> None:
        self._send(UploadKind.ENTRIES, num_ints, lambda rank, each: each.enter(num_ints))
        self._leader.enter(num_ints)

    def forward(self, num_ints: int) -> Any:
        def forward(rank: int, each: Executor) -> None:
            self._tickets[rank] = each.forward(num_ints)
            while not each.go_on(self._tickets[rank]):
                pass

        self._send(UploadKind.STEP, num_ints, forward)
        return self._leader.forward(num_ints)

    def go_on(self, ticket: Any) -> bool:
        return self._leader.go_on(ticket)

    def sample(self, ticket: Any, num_ints: int) -> Any:
        def sample(rank: int, each: Executor) -> None:
            self._keep(rank, each.sample(self._tickets[rank], num_ints))

        self._send(UploadKind.MASKS, num_ints, sample)
        return self._keep(0, self._leader.sample(ticket, num_ints))

    def result(self, ticket: Any) -> StepResult:
        return self._leader.result(ticket)

    def ready(self, ticket: Any) -> bool:
        return self._leader.ready(ticket)

    def transfer(self, direction: Direction, pages: PagePairs) -> Any:
        for rank, each in enumerate(self.executors[1:], 1):
            self._told.append(self._start(rank, each.transfer, direction, pages))
        return self._leader.transfer(direction, pages)

    def transferred(self, ticket: Any) -> bool:
        return self._leader.transferred(ticket)

    def expert_counters(self) -> ExpertCounters | None:
        return self._leader.expert_counters()

    def close(self) -> None:
        """Raises what a thread has raised."""
        for told in self._told:
            told.result()
        for thread in self._threads:
            thread.shutdown()

    def _send(self, kind: UploadKind, num_ints: int, use: Callable[[int, Executor], None]) -> None:
        upload = self._leader.buffer(kind)[:num_ints].copy()

        def take(rank: int, each: Executor) -> None:
            each.buffer(kind)[:num_ints] = upload
            use(rank, each)

        for rank, each in enumerate(self.executors[1:], 1):
            self._told.append(self._start(rank, take, rank, each))

    def _start(self, rank: int, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        def run() -> Any:
            try:
                return call(*arguments)
            except Exception:
                self._meeting.end()
                raise

        return self._threads[rank].submit(run)

    def _keep(self, rank: int, ticket: EagerTicket) -> EagerTicket:
        assert ticket.sampled is not None
        self.tokens[rank].append(ticket.sampled.tokens_S.numpy())
        self.logits[rank].append(ticket.logits_SV)
        return ticket
