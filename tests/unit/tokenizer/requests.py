"""Requests as a router sends them, with everything that a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from common.messages.address import Address, AttemptId, Route
from common.messages.arrays import int32s
from common.messages.sampling import SamplingParams
from common.messages.tokenize import StreamSettings, TextPrompt, Tokenize, TokenLimits

LIMITS = TokenLimits(
    max_model_len=256, max_input_length=200, max_output_length=100, vocab_size=1000
)


def address(name: str) -> Address:
    """The address that an in-memory exchange gives to the first life of `name`."""
    return Address(f"mem://{name}", f"{name}.1")


def request(counter: int, router: str = "router.1", **changes: Any) -> Tokenize:
    """One request of a router instance, by its first attempt."""
    name = router.partition(".")[0]
    values: dict[str, Any] = {
        "attempt": AttemptId(router, counter),
        "route": Route(
            tokenizer=address("tokenizer"),
            compute=address("compute"),
            detokenizer=address("detokenizer"),
            reply=Address(f"mem://{name}", router),
        ),
        "prompt": TextPrompt("hello"),
        "sampling": SamplingParams(max_tokens=16, seed=1),
        "stream": StreamSettings(),
        "limits": LIMITS,
        "admitted_at_s": 1_700_000_000.0,
        "output_ids": int32s(),
    }
    return Tokenize(**{**values, **changes})
