"""One compute actor with a real mask worker, over a small tokenizer that can write JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.sim import LatencyModel, SimRunner, closing_ids
from tests.flow import compute_ring
from tests.flow.compute_ring import Ring

EOS = 2
VOCAB_SIZE = 1_000


def make_tokenizer() -> Tokenizer:
    """Bytes, a few words, and special tokens; ids 0 to 3 are special."""
    special = ["<unk>", "<s>", "</s>", "<tool_call>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*special, *alphabet])}
    merges = [("t", "r"), ("tr", "u"), ("tru", "e"), ('"', ":"), ('"', "}"), ('"', ","), ("1", "2")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


@cache
def tokenizer() -> Tokenizer:
    """The same for all tests."""
    return make_tokenizer()


def save_tokenizer(folder: Path) -> Path:
    """Write its tokenizer.json."""
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def schema_grammar(schema: dict[str, Any]) -> str:
    """The grammar of a JSON schema, as the tokenizer's service makes it."""
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def structured(
    grammar: str = "", max_tokens: int = 200, seed: int = 1, **rules: Any
) -> dict[str, SamplingParams]:
    """The fields of `Ring.ask` for a structured request."""
    grammar_spec = GrammarSpec(grammar=grammar, **rules)
    return {"sampling": SamplingParams(max_tokens=max_tokens, seed=seed, grammar_spec=grammar_spec)}


def text_of(ids: list[int]) -> str:
    """What the client would read."""
    return str(tokenizer().decode(ids))


@asynccontextmanager
async def structured_ring(
    folder: Path, step_s: float = 0.002, num_pages: int = 256, **settings: Any
) -> AsyncIterator[Ring]:
    """Start a compute service that can make masks, and stop it at the end."""
    ring = Ring(num_pages, step_s, str(save_tokenizer(folder)), **settings)
    spec: RunnerSpec = ring.device.runner.spec()
    closing = closing_ids(folder, VOCAB_SIZE)
    ring.use(SimRunner(spec, LatencyModel(step_s, 0.0, 0.0), closing_ids=closing))
    await ring.start()
    ticking = asyncio.create_task(tick(ring))
    try:
        yield ring
    finally:
        ticking.cancel()
        await ring.actor.stop()


async def tick(ring: Ring) -> None:
    """What the service's lifecycle does."""
    while True:
        ring.actor.tick(time.monotonic())
        await asyncio.sleep(0.05)


assert compute_ring.CARD.vocab_size == VOCAB_SIZE
