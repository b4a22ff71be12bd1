"""With drafts every text is what it is without, whatever else happens to its sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner.packing_runner import PackingRunner
from tests.cases import num_cases
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
    """What servers of a model say in the same histories, in little memory."""

    def __init__(self, variant: str, folder: Path) -> None:
        self.model = make_model(variant)
        self.folder = save_model(self.model, folder)
        self.without: dict[int, Server] = {}
        self._runners: dict[str, PackingRunner] = {}
        self._heads: dict[str, str] = {}

    def drafts_by(self, method: str) -> str:
        """The setting; heads are random ones, and a small model is the model itself."""
        if method == "ngram":
            return OFTEN
        if method == "draft_model":
            return drafts_by(self.folder)
        if method not in self._heads:
            folder = self.folder / "head" / method
            _, self._heads[method] = save_head(method, self.model, self.folder, folder)
        return self._heads[method]

    def played(self, config: str, seed: int) -> Server:
        few = {"num_pages": 12, "num_host_pages": 20, "eos_token_ids": EOS_IDS, "overlaps": True}
        settings = SETTINGS.model_copy(update={"speculative_config": config})
        if config not in self._runners:
            self._runners[config] = load_on_cpu(self.folder, settings, warmup=True)
        server = Server(Restricted(self._runners[config], **few), settings)
        said = self.without[seed].tokens if seed in self.without else {}
        play(server, repeating_history(seed), dict(list(said.items())[::2]))
        return server

    def with_drafts(self, config: str, seeds: Sequence[int]) -> tuple[int, int, set[str]]:
        """Check that they say the same; returns how many drafts there were, how many were right,
        and what they were from."""
        servers = []
        for seed in seeds:
            if seed not in self.without:
                self.without[seed] = self.played("off", seed)
            without, server = self.without[seed], self.played(config, seed)
            check_same((without.tokens, without.reasons), (server.tokens, server.reasons))
            servers.append(server)
        stats = [server.scheduler.stats() for server in servers]
        num_drafts = sum(s.drafts_total for s in stats)
        num_right = sum(s.accepted_drafts_total for s in stats)
        return num_drafts, num_right, {each.drafter for each in stats[0].drafts}


HistoriesOf: TypeAlias = Callable[[str], Histories]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> HistoriesOf:
    """Of a variant."""
    return cache(lambda variant: Histories(variant, tmp_path_factory.mktemp(variant)))


@pytest.mark.parametrize("variant", ["llama", "mistral_window"])
def test_random_histories_say_the_same(variant: str, histories: HistoriesOf) -> None:
    num_drafts, num_right, drafters = histories(variant).with_drafts(OFTEN, range(3))
    assert 20 < num_right < num_drafts - 20
    assert drafters == {"ngram", "prediction"}
    without = histories(variant).without.values()
    assert sum(server.scheduler.stats().preemptions_total for server in without)


@pytest.mark.parametrize("variant", ["llama", "qwen2_window"])
@settings(max_examples=num_cases(1, 5))
@example(seed=22528)
@given(seed=st.integers(0, 2**31))
def test_a_model_that_drafts_for_itself_is_always_right(
    variant: str, seed: int, histories: HistoriesOf
) -> None:
    config = drafts_by(histories(variant).folder)
    num_drafts, num_right, drafters = histories(variant).with_drafts(config, (seed,))
    assert num_right == num_drafts > 60
    assert drafters == {"draft_model"}


def test_a_model_of_windows_that_drafts_for_itself_is_nearly_always_right(
    histories: HistoriesOf,
) -> None:
    """What it reads late may have seen what has left the window, and no page has that any more."""
    config = drafts_by(histories("mistral_window").folder)
    num_drafts, num_right, _ = histories("mistral_window").with_drafts(config, (0, 2028277857))
    assert num_right > 0.98 * num_drafts > 200


def test_a_model_that_knows_nothing_changes_no_text(tmp_path: Path, histories: HistoriesOf) -> None:
    folder = save_model(make_model("qwen2_window", seed=8), tmp_path)
    num_drafts, num_right, _ = histories("llama").with_drafts(drafts_by(folder), (0,))
    assert num_right < num_drafts / 3  # most requests have but three words to say


def test_an_answer_that_was_given_before_is_followed_but_not_for_another_tenant(
    histories: HistoriesOf,
) -> None:
    config = '{"method": "suffix", "num_speculative_tokens": 3}'
    settings = SETTINGS.model_copy(update={"speculative_config": config})
    server = Server(load_on_cpu(histories("llama").folder, settings), settings)

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
    [
        ("ngram", "llama"),
        ("draft_model", "mistral_window"),
        ("eagle", "llama"),
        ("eagle3", "mistral_window"),
        ("medusa", "llama"),
        ("mtp", "deepseek_v3"),
        ("mtp 2", "glm4_moe"),
    ],
)
@settings(max_examples=num_cases(1, 5))
@given(seed=st.integers(0, 2**31))
def test_any_history_says_the_same_by_any_drafter(
    method: str, variant: str, seed: int, histories: HistoriesOf
) -> None:
    config = histories(variant).drafts_by(method)
    num_drafts, num_right, drafters = histories(variant).with_drafts(config, (seed,))
    assert 0 < num_right <= num_drafts and method.split()[0] in drafters
