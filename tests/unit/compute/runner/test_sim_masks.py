"""The virtual device under masks: what it may say, when it comes to an end, what waiting costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.runner.sim import SimRunner, TokenScript, closing_ids
from services.compute.step import SlotDelta, TokenMasks
from tests.flow.structured_ring import save_tokenizer, tokenizer
from tests.ranked_folder import write_ranked
from tests.unit.compute.runner.sim_runners import SPEC, Clock, plan, runner
from tests.unit.compute.token_masks import bits_of

VOCAB_SIZE = SPEC.vocab_size
GRAMMAR = GrammarSpec("start: /a/")


def structured(slot: int, seed: int, grammar_spec: GrammarSpec = GRAMMAR) -> SlotDelta:
    sampling = SamplingParams(max_tokens=10, seed=seed, grammar_spec=grammar_spec)
    return SlotDelta(slot, 0, sampling, choice=0, stop_ids=(2, 3))


def make_masks(allowed: list[list[int]], skipped: tuple[int, ...] = ()) -> TokenMasks:
    bits = np.array([bits_of(ids, VOCAB_SIZE) for ids in allowed], dtype=np.int32)
    return TokenMasks(np.arange(len(allowed), dtype=np.int32), bits, skipped)


@given(
    allowed=st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1),
    seed=st.integers(0, 2**63),
    index=st.integers(0, 500),
)
def test_only_allowed_tokens_are_said_and_the_end_last(
    allowed: set[int], seed: int, index: int
) -> None:
    script = TokenScript(SPEC, closing_ids=(50, 60))
    delta = structured(0, seed)
    mask_W = bits_of(sorted(allowed), VOCAB_SIZE)
    token = script.token(delta, index)
    said = script.allowed_token(delta, index, token, mask_W)
    assert said in allowed
    if (index + seed) % 4 != 3:
        assert said == token or token not in allowed
        assert said not in (2, 3) or allowed <= {2, 3}
    elif allowed & {2, 3}:
        assert said in (2, 3)
    elif allowed & {50, 60}:
        assert said == (50 if 50 in allowed else 60)


def test_without_a_grammar_nothing_hurries_to_the_end() -> None:
    script = TokenScript(SPEC, closing_ids=())
    delta = structured(0, 1, GrammarSpec(allowed_token_ids=(7,)))
    mask_W = bits_of([2, 7], VOCAB_SIZE)
    said = [script.allowed_token(delta, index, 40, mask_W) for index in range(8)]
    assert said == [7] * 8


def test_masks_decide_the_tokens_of_structured_samples_alone() -> None:
    clock = Clock()
    device: SimRunner = runner(clock)
    step = plan(0, 0, slots=(structured(0, 5), structured(1, 6)))
    free = device.result(device.sample(device.forward(step))).tokens[:, 0].tolist()
    ticket = device.sample(device.forward(step), make_masks([[9]], skipped=(1,)))
    assert device.result(ticket).tokens[:, 0].tolist() == [9, free[1]]


def test_a_device_that_waits_for_masks_ends_the_later() -> None:
    clock = Clock()
    device = runner(clock)
    ticket = device.forward(plan(0, slots=(structured(0, 5),)))
    clock.now_s += 0.5
    ticket = device.sample(ticket, make_masks([[9]]))
    assert device.result(ticket).device_end_s == clock.now_s
    after = device.sample(device.forward(plan(1)))
    assert after.start_s == clock.now_s


def test_masks_in_time_cost_the_device_nothing() -> None:
    clock = Clock()
    device = runner(clock)
    ticket = device.forward(plan(0, slots=(structured(0, 5),)))
    clock.now_s += 0.001
    assert device.sample(ticket, make_masks([[9]])).end_s == ticket.end_s


def test_the_tokens_that_close_json_are_found_in_the_tokenizer(tmp_path: Path) -> None:
    ids = closing_ids(save_tokenizer(tmp_path), 1_000)
    assert [tokenizer().id_to_token(token) for token in ids] == ['"}', '"', "}", "]", ",", ":", "0"]


def test_they_are_found_in_ranks_of_tiktoken_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ids = closing_ids(write_ranked(tmp_path / "model"), 1_000)
    assert bytes(ids) == b'"}],:0'


@pytest.mark.parametrize("text", [None, '{"model": {"vocab": [["a", 1.0]]}}', "{}"])
def test_without_such_a_tokenizer_there_are_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    assert closing_ids(tmp_path, 1_000) == ()
