"""Messages of a step: one message for each detokenizer, with every output in it."""

from __future__ import annotations

import numpy as np

from common.messages.address import Address, AttemptId
from common.messages.failure import Ending, Usage
from common.messages.tokens import StreamOpened, TokenLogprobs, TokenRow
from services.compute.actor import pack_outputs
from services.compute.scheduler.outputs import (
    Output,
    SequenceOutput,
    StepTokens,
    sequence_outputs,
)

ONE, OTHER = Address("inproc://one", "1"), Address("inproc://other", "2")


def step_tokens(detokenizer: Address, router: str, *samples: tuple[int, int, int]) -> StepTokens:
    """Tokens of sequences that merely go on: (counter, index, token) of each."""
    columns = np.array(samples, dtype=np.int64).T.copy()
    return StepTokens(
        detokenizer, router, columns[0], columns[1].astype(np.int32), columns[2].astype(np.int32)
    )


OUTPUTS: list[Output] = [
    SequenceOutput(
        AttemptId("b", 1), ONE, b"h1", 0, (5,), opened=True, prompt_tokens=7, queued_s=0.5
    ),
    SequenceOutput(AttemptId("a", 2), OTHER, b"h2", 3, (6,), 0, (TokenLogprobs(-0.5),)),
    step_tokens(ONE, "a", (3, 4, 50), (1 << 40, 0, 60)),
    step_tokens(ONE, "b", (4, 9, 70)),
    step_tokens(OTHER, "b", (5, 1, 80)),
    SequenceOutput(
        AttemptId("a", 3), ONE, b"h3", 5, (51,), ending=Ending("length", Usage(7, 0, 6))
    ),
]


def content(outputs: list[Output]) -> dict[Address, list[TokenRow]]:
    """What each detokenizer reads."""
    found = {}
    for detokenizer, message in pack_outputs(3, outputs):
        message.check()
        assert message.step_id == 3
        assert detokenizer not in found
        found[detokenizer] = list(message.rows())
    return found


def test_rows_say_what_became_of_drafts_where_no_ending_does() -> None:
    ending = Ending("stop", Usage(7, 0, 3, 1, 2))
    outputs: list[Output] = [
        SequenceOutput(AttemptId("b", 1), ONE, b"", 1, (5,), drafted=(0, 2)),
        SequenceOutput(AttemptId("b", 1), ONE, b"h1", 2, (6,), ending=ending, drafted=(1, 2)),
        step_tokens(ONE, "b", (2, 4, 8)),
    ]
    assert [row.drafted for row in content(outputs)[ONE]] == [(0, 2), None, None]


def test_each_detokenizer_gets_its_rows_in_one_message() -> None:
    found = content(OUTPUTS)
    assert [(*row[:3], tuple(row.token_ids)) for row in found[ONE]] == [
        ("b", 1, 0, (5,)),
        ("a", 3, 4, (50,)),
        ("a", 1 << 40, 0, (60,)),
        ("b", 4, 9, (70,)),
        ("a", 3, 5, (51,)),
    ]
    assert [(*row[:3], tuple(row.token_ids)) for row in found[OTHER]] == [
        ("a", 2, 3, (6,)),
        ("b", 5, 1, (80,)),
    ]
    assert [row.opened is not None for row in found[ONE]] == [True, False, False, False, False]
    assert found[ONE][0].opened == StreamOpened(0, b"h1", 7, 0, 0.5)
    assert found[ONE][4].ended is not None
    assert found[OTHER][0].logprobs is not None


def test_columns_say_what_an_event_for_each_sequence_would() -> None:
    assert content(OUTPUTS) == content(list(sequence_outputs(OUTPUTS)))


def test_no_outputs_make_no_message() -> None:
    assert pack_outputs(1, []) == []
