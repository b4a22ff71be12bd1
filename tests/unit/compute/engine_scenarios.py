"""What the engine has to get right in float32 greedy decoding, whatever happens to a sequence.

A test module has a class of its own that inherits the tests, and gives the fixtures `serve`
(serve(spec, **settings) makes a Server on a runner that says of itself what `spec` says), `model`
(the transformers model) and `expected` (what it generates for each of PROMPTS, COUNT tokens).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.messages.sampling import SamplingParams
from services.compute.replica_health import MIN_NONFINITE
from services.compute.runner.protocol import SlotErrors
from tests.unit.compute.engine_histories import (
    EOS_IDS,
    MAX_CHOICES,
    check_greedy,
    play,
    random_history,
)
from tests.unit.compute.engine_server import Server
from tests.unit.compute.runner_scenarios import prompt_of
from tests.unit.compute.tiny_models import make_model, save_model

COUNT = 20
PROMPTS = [prompt_of(length, length) for length in (5, 16, 37, 61)]
GREEDY = SamplingParams(max_tokens=COUNT, seed=1, temperature=0.0, ignore_eos=True)
FEW = replace(GREEDY, max_tokens=6)
NUM_HOST_PAGES = {"no_swap": 0, "swap_for_one": 5, "swap_for_all": 100}

BROKEN_ID = 190  # of a token whose weights are no numbers
NOT_BROKEN = replace(GREEDY, logit_bias=((BROKEN_ID, -1e4),))  # may not sample it

Serve = Callable[..., Server]


def save_broken(folder: Path) -> Path:
    """A model of which one token's embedding is no number, as where memory was damaged."""
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN_ID] = torch.nan
    return save_model(model, folder)


def check_broken(server: Server) -> None:
    """Requests with that token fail, the others say what they say without them, and the replica
    finds out that it is ill, from the flags of a device's own sampler."""
    num_broken = 2 * MIN_NONFINITE
    prompts = [[token for token in prompt if token != BROKEN_ID] for prompt in PROMPTS]
    for counter, prompt in enumerate(prompts):
        server.ask(counter, prompt, NOT_BROKEN)
    for counter in range(10, 10 + 2 * num_broken, 2):
        server.ask(counter, [*prompts[1], BROKEN_ID, counter], NOT_BROKEN, num_choices=2)
    server.run()
    for counter in range(10, 10 + 2 * num_broken):
        assert (server.reasons[counter], server.tokens[counter]) == ("failed", [])
    together = answers(server)
    assert [len(answer) for answer in together] == [COUNT] * len(PROMPTS)
    stats, now_s = server.scheduler.stats(), time.monotonic()
    assert stats.nonfinite_requests_total == num_broken
    health = server.engine.health
    health.served(stats.started_total, stats.nonfinite_requests_total, stats.num_running, now_s)
    assert "non-finite logits in" in health.trouble(now_s)
    for counter, prompt in enumerate(prompts):
        server.ask(100 + counter, prompt, NOT_BROKEN)
    server.run()
    assert [server.tokens[100 + counter] for counter in range(len(PROMPTS))] == together


def ask_all(server: Server) -> None:
    for counter, prompt in enumerate(PROMPTS):
        server.ask(counter, prompt, GREEDY)


def answers(server: Server) -> list[list[int]]:
    return [server.tokens[counter] for counter in range(len(PROMPTS))]


class EngineScenarios:
    """The tests."""

    num_newcomers = 32

    @pytest.mark.parametrize("in_flight_steps", [0, 1])
    def test_together_and_in_chunks(self, serve: Serve, expected, in_flight_steps: int) -> None:
        server = serve(max_prefill_tokens=13, in_flight_steps=in_flight_steps)
        ask_all(server)
        server.run()
        assert answers(server) == expected

    def test_alone_and_again_from_the_prefix_tree(self, serve: Serve, expected) -> None:
        server = serve()
        for counter in (3, 13):
            server.ask(counter, PROMPTS[3], GREEDY)
            server.run()
            assert server.tokens[counter] == expected[3]
        assert (server.cached[3], server.cached[13]) == (0, 48)

    @pytest.mark.parametrize("num_host_pages", [0, 50])
    def test_preempted(self, serve: Serve, expected, num_host_pages: int) -> None:
        few = {"num_pages": 7, "max_model_len": 96, "num_host_pages": num_host_pages}
        server = serve(few)
        ask_all(server)
        server.run()
        assert answers(server) == expected
        assert server.scheduler.stats().preemptions_total > 0
        assert bool(server.most_swapped) == (num_host_pages > 0)

    def test_forks_share_the_prompt(self, serve: Serve, expected) -> None:
        server = serve()
        server.ask(0, PROMPTS[2], GREEDY, num_choices=3)
        server.run()
        assert [server.tokens[counter] for counter in range(3)] == [expected[2]] * 3
        assert sorted(server.cached.values()) == [0, 32, 32]

    def test_newcomers_that_share_a_prefix_in_one_step_say_what_each_says_alone(
        self, serve: Serve
    ) -> None:
        """The first computes the prefix and all others read it."""
        others = self.num_newcomers - 1
        prefix = prompt_of(40, 40)
        prompts = [prefix + prompt_of(number % 9 + 1, number) for number in range(others + 1)]
        alone = serve(prefix_cache=False)
        for counter, prompt in enumerate(prompts):
            alone.ask(counter, prompt, FEW)
            alone.run()
        together = serve(max_num_seqs=32, max_prefill_tokens=512)
        for counter, prompt in enumerate(prompts):
            together.ask(counter, prompt, FEW)
        together.turn()
        assert together.scheduler.stats().num_running == others + 1
        together.run()
        assert together.tokens == alone.tokens
        assert list(together.cached.values()).count(32) == others
        assert together.engine.stats.num_prefill_tokens == sum(map(len, prompts)) - others * 32

    def test_a_newcomer_whose_settings_cannot_be_taken_fails_alone(
        self, serve: Serve, expected
    ) -> None:
        """A choice that no device has room for; it shares a prefix with one that goes on."""
        server = serve()
        ask_all(server)
        server.turn()
        server.ask(10, PROMPTS[3], GREEDY, first_choice=1 << 70)
        server.ask(11, PROMPTS[3], GREEDY)
        while 10 not in server.reasons:
            server.turn()
        (error,) = server.errors
        assert isinstance(error, SlotErrors)
        server.errors.clear()
        server.run()
        assert server.reasons.pop(10) == "failed"
        assert set(server.reasons.values()) == {"length"}
        assert (server.tokens[10], server.tokens[11]) == ([], expected[3])
        assert answers(server) == expected

    def test_a_retry_goes_on_from_the_journal(self, serve: Serve, expected) -> None:
        server = serve()
        server.ask(0, PROMPTS[2], GREEDY, output_ids=expected[2][:7])
        server.run()
        assert server.tokens[0] == expected[2][7:]

    @pytest.mark.parametrize("schedule", ["prefill_first", "static_batch"])
    def test_other_schools_give_the_same_tokens(
        self, serve: Serve, expected, schedule: str
    ) -> None:
        server = serve(schedule=schedule, static_batch_window_s=0.0)
        ask_all(server)
        server.run()
        assert answers(server) == expected

    @pytest.mark.parametrize("in_flight_steps", [0, 1])
    def test_a_late_eos_ends_the_text_where_transformers_ends_it(
        self, serve: Serve, expected, in_flight_steps: int
    ) -> None:
        eos = expected[0][6]
        end = expected[0].index(eos) + 1
        server = serve({"eos_token_ids": (eos,)}, in_flight_steps=in_flight_steps)
        server.ask(0, PROMPTS[0], SamplingParams(COUNT, seed=1, temperature=0.0))
        server.ask(1, PROMPTS[1], GREEDY)
        server.run()
        assert server.tokens[0] == expected[0][:end]
        assert (server.reasons[0], server.reasons[1]) == ("stop", "length")
        assert server.tokens[1] == expected[1]

    @pytest.fixture(params=NUM_HOST_PAGES)
    def swap(self, request: pytest.FixtureRequest) -> str:
        """How many pages the host has."""
        return str(request.param)

    def test_a_random_history_of_arrivals_aborts_preemptions_prefixes_and_forks(
        self, serve: Serve, model, swap: str
    ) -> None:
        # Without drafts: with them too few are there at the same time to be short of pages.
        few = {"num_pages": 12, "max_model_len": 128, "num_host_pages": NUM_HOST_PAGES[swap]}
        spec = {**few, "eos_token_ids": EOS_IDS, "max_drafts": 0}
        server = serve(spec, max_prefill_tokens=50)
        history = random_history(4, 16, 40, greedy=True)
        play(server, history)
        check_greedy(model, server, history)
        assert {"stop", "length", "aborted"} == set(server.reasons.values())
        assert server.scheduler.stats().preemptions_total > 0
        assert bool(server.most_swapped) == (swap != "no_swap")
        assert max(server.cached.values()) >= 16
        assert max(ask.num_choices for ask in history) == MAX_CHOICES
