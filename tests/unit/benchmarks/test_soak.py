"""The soak's requests and what it holds against their answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak import beyond, growth, max_mib
from benchmarks.soak_requests import Answer, Mix, Turn, problems_of

MIX = Mix("tiny", seed=1, first_id=256, last_id=3840)


def test_a_number_is_always_the_same_request() -> None:
    assert MIX.turn(7) == Mix("tiny", 1, 256, 3840).turn(7)
    assert MIX.turn(7) != MIX.turn(8)
    assert MIX.turn(7) != replace(MIX, seed=2).turn(7)


def test_every_kind_of_request_comes_up() -> None:
    turns = [MIX.turn(number) for number in range(2000)]
    fields = Counter(name for turn in turns for name in turn.body)
    expected = """top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias
        stop stop_token_ids min_tokens n logprobs priority cache_salt stream"""
    assert all(fields[name] >= 20 for name in expected.split())
    assert sum(turn.leaves_after_events is not None for turn in turns) > 100
    assert sum(turn.leaves_after_s is not None for turn in turns) > 100
    assert sum(isinstance(turn.body["prompt"], str) for turn in turns) > 100
    assert sum(turn.body["temperature"] == 0 for turn in turns) > 100
    assert all(turn.body.get("min_tokens", 0) <= turn.body["max_tokens"] for turn in turns)


def test_prompts_share_prefixes() -> None:
    beginnings = Counter(
        tuple(turn.body["prompt"][:8])
        for turn in map(MIX.turn, range(500))
        if isinstance(turn.body["prompt"], list)
    )
    assert max(beginnings.values()) > 20


def turn(**fields: Any) -> Turn:
    body = {"model": "tiny", "prompt": [300, 301], "max_tokens": 4, "ignore_eos": True}
    return Turn(1, body | fields)


def chunk(text: str = "", end: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": end}]}


def answer(*chunks: dict[str, Any], used: int = 4, sent: int = 2) -> Answer:
    found = Answer()
    for each in chunks:
        found.take(each)
    usage = {"prompt_tokens": sent, "completion_tokens": used}
    found.take({"choices": [], "usage": usage})
    return found


def test_an_answer_as_asked_has_no_problem() -> None:
    assert problems_of(turn(), answer(chunk("a"), chunk("b", "length"))) == []
    two = answer(chunk("a", "length", 1), chunk("b", "length", 0), used=8)
    assert problems_of(turn(n=2), two) == []
    stopped = answer(chunk("a ", "stop"), used=2)
    assert problems_of(turn(stop=["ba"]), stopped) == []


@pytest.mark.parametrize(
    ("asked", "found", "said"),
    [
        (turn(), answer(chunk("a")), "its choices ended"),
        (turn(n=2), answer(chunk("a", "length"), used=8), "its choices ended"),
        (turn(), answer(chunk("a", "length", 1)), "its choices ended"),
        (turn(), answer(chunk("a", "length"), chunk("", "length")), "its choices ended"),
        (turn(), answer(chunk("a", "abort")), "ended with abort"),
        (turn(), answer(chunk("a", "length"), used=5), "5 tokens of 4 at most"),
        (turn(), answer(chunk("a", "length"), used=3), "3 tokens of exactly 4"),
        (turn(), answer(chunk("a", "length"), sent=3), "3 prompt tokens of 2"),
        (turn(), answer({"error": "broken"}), "broken"),
        (turn(logprobs=1), answer(chunk("a", "length")), "0 logprobs of 4 tokens"),
        (turn(stop=["ba"]), answer(chunk("a b"), chunk("ah", "stop")), "the stop string 'ba'"),
    ],
)
def test_an_answer_that_is_not_as_asked_is_a_problem(asked: Turn, found: Answer, said: str) -> None:
    assert said in " ".join(problems_of(asked, found))


def test_stop_strings_may_come_before_min_tokens() -> None:
    asked = turn(stop=["ba"], min_tokens=4)
    assert problems_of(asked, answer(chunk(" ba", "length"))) == []


def test_a_process_that_grows_is_named_and_one_that_settles_is_not() -> None:
    memory = [
        (100, {"compute": 50.0, "router": 50.0}),
        (400, {"compute": 80.0, "router": 60.0}),
        (1000, {"compute": 81.0, "router": 160.0}),
    ]
    assert growth(memory, 1000) == ["router from 60 to 160 MiB"]
    assert growth(memory[:2], 1000) == []
    assert growth([*memory[:2], (1000, {"compute": 80.0})], 1000) == ["router is gone"]


def test_every_process_has_a_bound() -> None:
    services = ("router-0", "compute-0", "tokenizer-0", "tokenizer-1", "detokenizer-0")
    children = ("compute-0/mask_worker.0", "tokenizer-0/worker.0", "tokenizer-0/worker.1")
    used = dict.fromkeys(("launcher", *services, *children), 50.0)
    assert beyond([(100, used)], max_mib("sim")) == []
    more = used | {"tokenizer-0/worker.1": 1000.0}
    assert beyond([(100, more), (200, used)], max_mib("sim")) == [
        "tokenizer-0/worker.1 had 1000 MiB of 128"
    ]
    assert beyond([(100, {"launcher": 50.0})], {"launcher": 96.0, "router": 160.0}) == [
        "no router was seen"
    ]


def test_a_model_on_the_cpu_has_more_and_one_beside_a_gpu_no_bound() -> None:
    assert max_mib("cpu")["compute"] > max_mib("sim")["compute"]
    assert "compute" not in max_mib("cuda")
