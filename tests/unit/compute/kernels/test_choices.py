"""A product is launched with what was measured for it, else with what its heuristic says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.compute.kernels.choices import Choices, Key, Measured, Options, rows_bucket

KEY = Key("skinny_matmul", "bfloat16", 4096, 4096, 16)


def options(key: Key = KEY) -> Options[int]:
    return Options(key, 1, lambda: [2, 1, 3, 2])


def test_the_default_is_the_first_option_and_each_is_there_once() -> None:
    assert options().all == [1, 2, 3]


def test_what_is_not_chosen_is_launched_with_its_default() -> None:
    launched: list[int] = []
    Choices().launch(options(), launched.append)
    assert launched == [1]


def test_what_is_chosen_is_launched_so_and_other_keys_are_not() -> None:
    choices, launched = Choices(), []
    choices.add({KEY: Measured(3, 1.0, 2.0)})
    choices.launch(options(), launched.append)
    choices.launch(options(KEY._replace(num_tokens=32)), launched.append)
    assert launched == [3, 1]


def test_asked_launches_are_noted_and_not_run() -> None:
    choices, launched = Choices(), []
    known = KEY._replace(num_out=512)
    choices.add({known: Measured(3, 1.0, 2.0)})
    with choices.asking() as asked:
        for key in (KEY, known, KEY):
            choices.launch(options(key), launched.append)
    assert launched == []
    assert list(asked) == [KEY]
    assert len(asked[KEY].launches) == 2  # of two layers
    asked[KEY].launches[1](2)
    choices.launch(options(), launched.append)
    assert launched == [2, 1]


def test_a_pass_that_fails_does_not_leave_products_unlaunched() -> None:
    choices, launched = Choices(), []
    with pytest.raises(RuntimeError), choices.asking():
        raise RuntimeError
    choices.launch(options(), launched.append)
    assert launched == [1]


@given(st.integers(1, 100_000))
def test_rows_share_a_choice_with_those_of_their_power_of_two(num_tokens: int) -> None:
    bucket = rows_bucket(num_tokens)
    assert bucket in (16, 32, 64, 128, 256, 512)
    assert bucket >= min(num_tokens, 512)
    assert bucket == 16 or num_tokens > bucket // 2
