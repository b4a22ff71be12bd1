"""With drafts every text is what it is without, whatever else happens to its sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.draft_heads import save_head
from tests.unit.compute.engine_histories import EOS_IDS, check_same, play, repeating_history
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.tiny_models import make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=32, max_batched_token_mem=2048, swap_space=0.003,
    num_threads=1, max_prefill_tokens=24,
)  # fmt: skip
OFTEN = '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'


def drafts_by(folder: Path) -> str:
    return json.dumps({"model": str(folder), "num_speculative_tokens": 3})


class Histories:
    """What servers of a model say in the same three histories, in little memory."""

    def __init__(self, variant: str, folder: Path) -> None:
        self.model = make_model(variant)
        self.folder = save_model(self.model, folder)
        self.without: list[Server] = []
        self.without = self.played("off", range(3))
        assert sum(server.scheduler.stats().preemptions_total for server in self.without)

    def played(self, config: str, seeds: Sequence[int]) -> list[Server]:
        few = {"num_pages": 12, "num_host_pages": 20, "eos_token_ids": EOS_IDS, "overlaps": True}
        settings = SETTINGS.model_copy(update={"speculative_config": config})
        runner, servers = load_on_cpu(self.folder, settings), []
        for seed in seeds:
            server = Server(Restricted(runner, **few), settings)
            said = self.without[seed].tokens if self.without else {}
            play(server, repeating_history(seed), dict(list(said.items())[::2]))
            servers.append(server)
        return servers

    def with_drafts(self, config: str, seeds: Sequence[int]) -> tuple[int, int, set[str]]:
        """Check that they say the same; returns how many drafts there were, how many were right,
        and what they were from."""
        servers = self.played(config, seeds)
        for seed, server in zip(seeds, servers, strict=True):
            without = self.without[seed]
            check_same((without.tokens, without.reasons), (server.tokens, server.reasons))
        stats = [server.scheduler.stats() for server in servers]
        num_drafts = sum(s.drafts_total for s in stats)
        num_right = sum(s.accepted_drafts_total for s in stats)
        return num_drafts, num_right, {each.drafter for each in stats[0].drafts}


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Histories]:
    return {
        variant: Histories(variant, tmp_path_factory.mktemp(variant))
        for variant in ("llama", "mistral_window")
    }


@pytest.mark.parametrize("variant", ["llama", "mistral_window"])
def test_random_histories_say_the_same(variant: str, histories: dict[str, Histories]) -> None:
    num_drafts, num_right, drafters = histories[variant].with_drafts(OFTEN, range(3))
    assert 20 < num_right < num_drafts - 20
    assert drafters == {"ngram", "prediction"}


@pytest.mark.parametrize("variant", ["llama", "mistral_window"])
def test_a_model_that_drafts_for_itself_is_always_right(
    variant: str, histories: dict[str, Histories]
) -> None:
    folder = histories[variant].folder
    num_drafts, num_right, drafters = histories[variant].with_drafts(drafts_by(folder), (0,))
    assert num_right == num_drafts > 100
    assert drafters == {"draft_model"}


def test_a_model_that_knows_nothing_changes_no_text(
    tmp_path: Path, histories: dict[str, Histories]
) -> None:
    folder = save_model(make_model("qwen2_window", seed=8), tmp_path)
    num_drafts, num_right, _ = histories["llama"].with_drafts(drafts_by(folder), (0,))
    assert num_right < num_drafts / 3  # most requests have but three words to say


def test_an_answer_that_was_given_before_is_followed_but_not_for_another_tenant(
    histories: dict[str, Histories],
) -> None:
    config = '{"method": "suffix", "num_speculative_tokens": 3}'
    settings = SETTINGS.model_copy(update={"speculative_config": config})
    server = Server(load_on_cpu(histories["llama"].folder, settings), settings)

    def right_of_an_answer(counter: int, **tenant: str) -> int:
        """How many drafts from past answers are in an answer to always the same."""
        before = {each.drafter: sum(each.accepted) for each in server.scheduler.stats().drafts}
        sampling = SamplingParams(24, seed=5, ignore_eos=True)
        server.ask(counter, [*range(3, 21)], sampling, **tenant)
        server.run()
        assert server.tokens[counter] == server.tokens[0]
        after = {each.drafter: sum(each.accepted) for each in server.scheduler.stats().drafts}
        return after.get("suffix", 0) - before.get("suffix", 0)

    assert right_of_an_answer(0, client="anna") == 0
    assert right_of_an_answer(1, client="anna") > 12
    assert right_of_an_answer(2, client="ben") == 0
    assert right_of_an_answer(3, client="ben", cache_salt="own") == 0
    server.scheduler.flush_prefix_cache()
    assert right_of_an_answer(4, client="anna") == 0


@pytest.mark.parametrize(
    ("method", "variant"),
    [("eagle3", "mistral_window"), ("medusa", "llama")],
)
def test_a_head_that_knows_nothing_changes_no_text(
    method: str, variant: str, tmp_path: Path, histories: dict[str, Histories]
) -> None:
    _, config = save_head(method, histories[variant].model, histories[variant].folder, tmp_path)
    num_drafts, num_right, drafters = histories[variant].with_drafts(config, (1,))
    assert 20 < num_right < num_drafts / 2 and drafters == {method}
