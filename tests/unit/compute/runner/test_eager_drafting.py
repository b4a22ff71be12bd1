"""With drafts every text is what it is without, whatever else happens to its sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.compute.config import ComputeSettings
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_histories import EOS_IDS, check_same, play, repeating_history
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.tiny_models import make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=32, max_batched_token_mem=2048, swap_space=0.003,
    num_threads=1, max_prefill_tokens=24,
)  # fmt: skip
OFTEN = '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'


@pytest.mark.parametrize("variant", ["llama", "mistral_window"])
def test_random_histories_say_the_same(variant: str, tmp_path: Path) -> None:
    folder = save_model(make_model(variant), tmp_path)
    texts = []
    few = {"num_pages": 12, "num_host_pages": 20, "eos_token_ids": EOS_IDS, "overlaps": True}
    for config in ("off", OFTEN):
        settings = SETTINGS.model_copy(update={"speculative_config": config})
        runner = load_on_cpu(folder, settings)
        servers = []
        for seed in range(3):
            server = Server(Restricted(runner, **few), settings)
            said = texts[0][seed][0] if texts else {}
            play(server, repeating_history(seed), dict(list(said.items())[::2]))
            servers.append(server)
        texts.append([(server.tokens, server.reasons) for server in servers])
        assert sum(server.scheduler.stats().preemptions_total for server in servers)
    drafting = [server.scheduler.stats() for server in servers]
    num_drafts = sum(stats.drafts_total for stats in drafting)
    num_accepted = sum(stats.accepted_drafts_total for stats in drafting)
    assert 20 < num_accepted < num_drafts - 20
    assert {each.drafter for each in drafting[0].drafts} == {"ngram", "prediction"}
    for without, with_drafts in zip(*texts, strict=True):
        check_same(without, with_drafts)
