"""CUDA runners for tests: loaded on the GPU or in Triton's interpreter, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.compute.config import ComputeSettings
from services.compute.expert_counters import ExpertCounters
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.cuda.load import load_on
from services.compute.runner.cuda.stream import DeviceStream, GraphStream
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.protocol import RunnerSpec
from services.compute.step import StepPlan, StepResult, TokenMasks
from tests.kernels.host_stream import HostStream

ON_GPU = torch.cuda.is_available()

SIZES = {} if ON_GPU else {"num_hidden_layers": 2}
"""What of a tiny model's config is smaller where the interpreter runs it."""

ONE_LAYER = {} if ON_GPU else {"num_hidden_layers": 1}
"""The same, for what has nothing to do with layers: that they are told apart other tests see."""

SETTINGS = ComputeSettings(
    device="cuda",
    dtype="float32",
    page_tokens=8,
    max_num_seqs=8 if ON_GPU else 4,
    max_prefill_tokens=120,
    max_batched_token_mem=2048,
    swap_space=0.01,
    speculative_config="off",  # steps are counted; drafts have tests of their own
)


def load_runner(folder: Path, settings: ComputeSettings, device: torch.device) -> PackingRunner:
    """The runner of a folder; on a GPU its stream becomes torch's, so the runner before is done."""
    stream: DeviceStream = GraphStream(device) if ON_GPU else HostStream()
    return PackingRunner(load_on(folder, settings, device, stream))


def logits_after_step(runner: PackingRunner, num_samples: int) -> Tensor:
    """Float32 logits [S, V] of the step launched last, on the host."""
    return _logits_SV(runner)[:num_samples].clone().cpu()


def _logits_SV(runner: PackingRunner) -> Tensor:
    return runner.executor._machine._decoder.logits_SV


class LogitsTap:
    """A runner that keeps a copy of the logits of every sample it draws.

    They are found by the seed and the choice of their sequence and the number of the output token,
    so requests need seeds of their own.
    """

    def __init__(self, runner: Any, machine: PackingRunner) -> None:
        """`machine` is the CUDA runner under `runner`."""
        self._runner = runner
        self._machine = machine
        self._owner: dict[int, tuple[int, int]] = {}
        self._steps: list[tuple[list[tuple[int, int, int]], Tensor]] = []

    def spec(self) -> RunnerSpec:
        return self._runner.spec()

    def forward(self, plan: StepPlan) -> Any:
        for delta in plan.slots:
            self._owner[delta.slot] = (delta.sampling.seed, delta.choice)
        return self._runner.forward(plan)

    def sample(self, ticket: Any, masks: TokenMasks | None = None) -> Any:
        ticket = self._runner.sample(ticket, masks)
        plan = ticket.plan
        slots = plan.row_slot[plan.sample_row].tolist()
        keys = [
            (*self._owner[slot], index)
            for slot, index in zip(slots, plan.sample_index.tolist(), strict=True)
        ]
        if keys:
            self._steps.append((keys, _logits_SV(self._machine)[: len(keys)].clone()))
        return ticket

    def result(self, ticket: Any) -> StepResult:
        return self._runner.result(ticket)

    def ready(self, ticket: Any) -> bool:
        return self._runner.ready(ticket)

    def transfer(self, direction: Direction, pages: PagePairs) -> Any:
        return self._runner.transfer(direction, pages)

    def transferred(self, ticket: Any) -> bool:
        return self._runner.transferred(ticket)

    def expert_counters(self) -> ExpertCounters | None:
        return self._runner.expert_counters()

    def close(self) -> None:
        self._runner.close()

    def check_against(self, others: dict[tuple[int, int, int], Tensor]) -> int:
        """Every sample's logits are bitwise those of the others, which it adds to if it is new.

        Returns how many were compared.
        """
        num_compared = 0
        for keys, logits_SV in self._steps:
            for key, logits_V in zip(keys, logits_SV.cpu(), strict=True):
                other = others.setdefault(key, logits_V)
                assert torch.equal(other, logits_V), (key, (other - logits_V).abs().max())
                num_compared += other is not logits_V
        return num_compared
