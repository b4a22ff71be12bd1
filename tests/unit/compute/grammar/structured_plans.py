"""Plans of structured samples, and what a device says to them, for tests of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.grammar.protocol import StartSequence
from services.compute.step import SlotDelta, StepPlan, StepResult

GRAMMAR_SPEC = GrammarSpec("start: /a*/", field="tools")


def int32s(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def make_delta(slot: int, epoch: int = 1, **changes: Any) -> SlotDelta:
    """A structured sequence takes a slot."""
    sampling = SamplingParams(
        max_tokens=10, seed=1, grammar_spec=changes.pop("grammar_spec", GRAMMAR_SPEC)
    )
    output_ids = int32s(changes.pop("output_ids", ()))
    return SlotDelta(slot, epoch, sampling, 0, (2,), output_ids=output_ids, **changes)


def make_plan(*rows: tuple[int, int, int], structured: Sequence[int] | None = None) -> StepPlan:
    """A decode step of these rows: slot, epoch and output index; all structured, unless told."""
    slots, epochs, indices = (int32s(column) for column in zip(*rows, strict=True))
    numbers = int32s(range(len(rows)))
    none = int32s([])
    return StepPlan(
        step_id=1,
        num_decode_rows=len(rows),
        row_slot=slots,
        row_epoch=epochs,
        q_start=numbers,
        q_len=np.ones_like(numbers),
        pos_upper=numbers + 1,
        tokens=numbers,
        sample_row=numbers,
        sample_index=indices,
        page_slot=none,
        page_index=none,
        page_id=none,
        structured=tuple(range(len(rows)) if structured is None else structured),
    )


def make_result(*tokens: int) -> StepResult:
    """One valid token a sample."""
    count = len(tokens)
    return StepResult(
        1,
        int32s(tokens).reshape(count, 1),
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
