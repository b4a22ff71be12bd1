"""Tokens that a grammar forces are computed several at once, and change no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.messages.sampling import GrammarSpec
from services.compute.config import ComputeSettings
from services.compute.runner.packing_runner import PackingRunner
from tests.flow.structured_ring import EOS, VOCAB_SIZE, schema_grammar
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.distributed.stage_memory import StagesHere
from tests.unit.compute.engine_histories import (
    PLAIN,
    Ask,
    check_same,
    kept_of,
    play,
    repeating_history,
)
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.masks_here import MasksHere
from tests.unit.compute.tiny_models import make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=32, max_batched_token_mem=2048, swap_space=0.003,
    num_threads=1, max_prefill_tokens=24,
)  # fmt: skip
OFTEN = '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["one", "two"]}, "length": {"type": "integer"}},
    "required": ["name", "length"],
    "additionalProperties": False,
}
GRAMMARS = (
    schema_grammar(SCHEMA),
    'start: "the answer is " ("yes" | "no") ", and it will not change" /[a-z]*/\n',
)


def structured_history(seed: int) -> list[Ask]:
    """Requests of which two in three have a grammar."""
    return [
        replace(ask, sampling=replace(ask.sampling, grammar_spec=GrammarSpec(GRAMMARS[number % 3])))
        if number % 3 < 2
        else replace(ask, sampling=replace(PLAIN, **kept_of(ask.sampling)))
        for number, ask in enumerate(repeating_history(seed))
    ]


@pytest.mark.parametrize(
    ("overlaps", "late", "num_stages"), [(True, 0.1, 1), (False, 0.0, 1), (False, 0.1, 2)]
)
def test_random_histories_say_the_same(
    overlaps: bool, late: float, num_stages: int, tmp_path: Path
) -> None:
    """In stages, too, where drafts are those of the last one, and plans give them to all."""
    folder = save_model(make_model("llama", vocab_size=VOCAB_SIZE), tmp_path)
    texts, logprobs, num_steps = [], [], []
    few = {"num_pages": 14, "num_host_pages": 20, "eos_token_ids": (EOS,), "overlaps": overlaps}
    for config in ("off", OFTEN):
        settings = SETTINGS.model_copy(update={"speculative_config": config})
        runner = load_on_cpu(folder, settings)
        if num_stages > 1 and config == OFTEN:
            runner = PackingRunner(StagesHere(folder, settings, num_stages).executor)
        servers = []
        for seed in range(2):
            masks = MasksHere(tmp_path, settings.max_num_seqs, late)
            server = Server(Restricted(runner, **few), settings, masks)
            play(server, structured_history(seed))
            masks.close()
            assert bool(masks.num_late) == bool(late)
            servers.append(server)
        texts.append([(server.tokens, server.reasons) for server in servers])
        logprobs.append([server.logprobs for server in servers])
        num_steps.append(sum(server.engine.stats.num_steps for server in servers))
        assert sum(server.scheduler.stats().preemptions_total for server in servers)
    stats = [server.scheduler.stats() for server in servers]
    assert sum(each.accepted_drafts_total for each in stats) > 100
    assert num_steps[1] < 0.9 * num_steps[0] or num_stages > 1
    for without, with_drafts in zip(*texts, strict=True):
        check_same(without, with_drafts)
    for before, after in zip(*logprobs, strict=True):
        assert before.keys() == after.keys()
        for counter, some in before.items():
            for one, other in zip(some, after[counter], strict=False):  # its client may be gone
                assert one.chosen == pytest.approx(other.chosen, abs=1e-3)
