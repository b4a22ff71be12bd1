"""Plans of structured samples, and what a device says to them, for tests of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.grammar.protocol import StartSequence
from services.compute.step import SlotDelta, StepPlan, StepResult, int32_array
from tests.unit.compute.step_plans import decode_plan

GRAMMAR_SPEC = GrammarSpec("start: /a*/", field="tools")


def make_delta(slot: int, epoch: int = 1, **changes: Any) -> SlotDelta:
    """A structured sequence takes a slot."""
    sampling = SamplingParams(
        max_tokens=10, seed=1, grammar_spec=changes.pop("grammar_spec", GRAMMAR_SPEC)
    )
    output_ids = int32_array(changes.pop("output_ids", ()))
    return SlotDelta(slot, epoch, sampling, 0, (2,), output_ids=output_ids, **changes)


def structured_plan(*rows: tuple[int, int, int], structured: Sequence[int] = ()) -> StepPlan:
    """A decode step of these rows: slot, epoch and output index; without numbers all structured."""
    return decode_plan(*rows, structured=tuple(structured or range(len(rows))))


def make_result(*tokens: int) -> StepResult:
    """One valid token a sample."""
    count = len(tokens)
    return StepResult(
        1,
        int32_array(tokens).reshape(count, 1),
        np.ones(count, dtype=np.int32),
        np.zeros(count, dtype=np.bool_),
    )


def make_start(grammar_spec: GrammarSpec, **changes: Any) -> StartSequence:
    fields: dict[str, Any] = {
        "slot": 0,
        "epoch": 1,
        "grammar_spec": grammar_spec,
        "eos_ids": (2,),
        "stop_ids": (),
        "min_tokens": 0,
        "ignore_eos": False,
        "max_tokens": 100,
        "output_ids": (),
    }
    return StartSequence(**{**fields, **changes})


def tokens_in(mask_W: np.ndarray[Any, np.dtype[np.int32]]) -> set[int]:
    bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
