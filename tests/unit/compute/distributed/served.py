"""What a model says to a few prompts, whatever it runs on."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from torch import Tensor

from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.models import weights
from services.compute.runner.protocol import Runner
from tests.unit.compute.engine_server import Server

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=8, max_batched_token_mem=1024, num_threads=1,
    warmup=False,
)  # fmt: skip
DUMMY = SETTINGS.model_copy(update={"load_format": "dummy", "warmup": True})
SPREAD = DUMMY.model_copy(update={"enable_expert_parallel": True})
HEARD_SCALE = 0.3
"""Of random weights: so large that all parts of a model are heard."""

PROMPTS = [[3 + 7 * place % 190 for place in range(16)], [5 + 11 * at % 187 for at in range(37)]]
GREEDY = SamplingParams(4, seed=1, temperature=0.0, ignore_eos=True, num_logprobs=2)


_draw = weights.DummyWeights.take


def take_by_name(source: Any, name: str, *rest: Any) -> Tensor:
    """Random weights of a name are the same, whatever else is made before them."""
    source._generator.manual_seed(crc32(name.encode()))
    return _draw(source, name, *rest)


def answers(runner: Runner, settings: ComputeSettings) -> Server:
    server = Server(runner, settings)
    for counter, prompt in enumerate(PROMPTS):
        server.ask(counter, prompt, GREEDY)
    server.run()
    return server


def tokens_of(runner: Runner, settings: ComputeSettings) -> list[list[int]]:
    server = answers(runner, settings)
    return [server.tokens[counter] for counter in range(len(PROMPTS))]
