"""What a runner sends of new sequences, and which of them it names where it cannot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.messages.sampling import SamplingParams
from services.compute.runner.executor import UploadKind
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.protocol import RunnerSpec, SlotErrors
from services.compute.step import MAX_BIAS, Int32Array, SlotDelta
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.step_plans import decode_plan

PLAIN = SamplingParams(max_tokens=8, seed=1, temperature=0.0)
TOO_LONG = replace(PLAIN, logit_bias=tuple((token, 1.0) for token in range(MAX_BIAS + 1)))


class Listening:
    """An executor that notes what it is called for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.out: Int32Array = np.zeros(100_000, dtype=np.int32)

    def spec(self) -> RunnerSpec:
        return replace(make_spec(), vocab_size=2 * MAX_BIAS)

    def buffer(self, kind: UploadKind) -> Int32Array:
        return self.out

    def enter(self, num_ints: int) -> None:
        self.calls.append("enter")

    def forward(self, num_ints: int) -> None:
        self.calls.append("forward")


def deltas_of(*settings: SamplingParams, choice: int = 0) -> tuple[SlotDelta, ...]:
    return tuple(SlotDelta(slot, 1, sampling, choice, ()) for slot, sampling in enumerate(settings))


def test_what_cannot_be_packed_is_named_and_nothing_is_sent() -> None:
    executor = Listening()
    penalised = replace(PLAIN, presence_penalty=1.0)
    deltas = deltas_of(penalised, TOO_LONG, PLAIN, TOO_LONG)
    with pytest.raises(SlotErrors, match="slot 1: ValueError.*; slot 3: ValueError") as raised:
        PackingRunner(executor).forward(decode_plan((0, 1, 0), slots=deltas))
    assert list(raised.value.by_slot) == [1, 3]
    assert raised.value.__cause__ is raised.value.by_slot[1]
    assert executor.calls == []


def test_entries_go_before_their_step() -> None:
    executor = Listening()
    deltas = deltas_of(replace(PLAIN, presence_penalty=1.0), PLAIN)
    PackingRunner(executor).forward(decode_plan((0, 1, 0), (1, 1, 0), slots=deltas))
    assert executor.calls == ["enter", "forward"]
