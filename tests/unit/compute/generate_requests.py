"""`Generate` messages for tests of the scheduler and of what drives it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams


def generate_request(
    counter: int, prompt: Iterable[int], sampling: SamplingParams, router: str = "r", **fields: Any
) -> Generate:
    """A request with attempts from `counter` on; `fields` are those of the message."""
    return Generate(
        attempt=AttemptId(router, counter),
        detokenizer=fields.pop("detokenizer", Address("mem://d", "d")),
        prompt_ids=int32s(prompt).tobytes(),
        output_ids=int32s(fields.pop("output_ids", ())),
        sampling=sampling,
        header=fields.pop("header", b""),
        admitted_at_s=0.0,
        **fields,
    )


def prompt_ids(request: Generate) -> list[int]:
    """The ids of a request's prompt."""
    ids = int32s()
    ids.frombytes(request.prompt_ids)
    return ids.tolist()
