"""What is fastest is chosen, in the time that there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from services.compute.distributed.ranks import ALONE
from services.compute.kernels.choices import Asked, Key, Measured, Options
from services.compute.runner.cuda.choosing import Launch, Measuring, chosen_by_first

BUDGET_S = 60.0


class FakeMeter:
    """A device on which a launch takes as long as its config says, and the host a while."""

    def __init__(self, compile_s: float = 0.0, time_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self._compile_s = compile_s
        self._time_s = time_s
        self.num_compiled = 0
        self.log: list[str] = []

    def compile(
        self, launches: Sequence[Launch], may_begin: Callable[[], bool], done: Launch
    ) -> list[bool]:
        begun = []
        for launch in launches:
            begun.append(may_begin())
            if begun[-1]:
                self.now_s += self._compile_s
                self.num_compiled += 1
                self.log.append("compile")
                launch()
            done()
        return begun

    def seconds(self, launches: Sequence[Launch]) -> float:
        self.now_s += self._time_s
        self.log.append("time")
        times = {launch() for launch in launches}
        assert len(times) == 1
        return times.pop()


def asked(num_out: int, *us: float, num_tokens: int = 16, layers: int = 3) -> Asked[float]:
    """A config of these is the microseconds it takes; the first is the default."""
    key = Key("skinny_matmul", "bfloat16", num_out, 4096, num_tokens)

    def run(config: float) -> float:
        return config / 1e6

    return Asked(Options(key, us[0], lambda: us[1:]), [run] * layers)


def choices(meter: FakeMeter, found: Sequence[Asked[float]]) -> dict[int, Measured[float]]:
    """By the number of outputs."""
    measuring = Measuring(meter, BUDGET_S, lambda: meter.now_s)
    return {key.num_out: choice for key, choice in measuring.choices(found)}


def test_the_fastest_is_chosen() -> None:
    chosen = choices(FakeMeter(), [asked(512, 10.0, 12.0, 8.0, 9.0)])[512]
    assert chosen.config == 8.0
    assert (chosen.us, chosen.default_us) == (pytest.approx(8.0), pytest.approx(10.0))


def test_what_is_hardly_faster_leaves_the_default() -> None:
    assert choices(FakeMeter(), [asked(512, 10.0, 9.9)])[512].config == 10.0


def test_what_cannot_be_launched_is_not_chosen() -> None:
    assert choices(FakeMeter(), [asked(512, 10.0, float("inf"), 7.0)])[512].config == 7.0
    assert choices(FakeMeter(), [asked(512, float("inf"), 7.0)])[512].config == 7.0


def test_nothing_is_compiled_while_something_is_timed() -> None:
    meter = FakeMeter()
    few = [asked(512, 1.0, 2.0), asked(1024, 1.0, 2.0)]
    choices(meter, [*few, asked(512, 1.0, 2.0, num_tokens=32)])
    assert meter.log == 6 * ["compile"] + 12 * ["time"]


def test_what_the_time_does_not_suffice_for_is_left_out() -> None:
    meter = FakeMeter(compile_s=5.0)
    found = [asked(512 * n, 2.0, 1.0, num_tokens=16 * n) for n in range(1, 20)]
    chosen = choices(meter, found)
    assert list(chosen) == [512 * n for n in range(1, 6)]  # ten kernels, and one in vain
    assert meter.num_compiled == 11
    assert meter.now_s - 1000.0 <= BUDGET_S


def test_a_key_of_which_a_kernel_was_not_compiled_is_left_out() -> None:
    meter = FakeMeter(compile_s=18.0)
    chosen = choices(meter, [asked(512, 2.0, 1.0), asked(1024, 2.0, 1.0)])
    assert list(chosen) == [512]


def test_timing_ends_with_the_budget() -> None:
    meter = FakeMeter(time_s=10.0)
    chosen = choices(meter, [asked(512 * n, 2.0, 1.0) for n in range(1, 10)])
    assert len(chosen) == 2
    assert meter.now_s - 1000.0 <= BUDGET_S + 4 * 10.0


def test_the_next_start_goes_on_with_what_is_left() -> None:
    found = [asked(512 * n, 2.0, 1.0, num_tokens=16 * n) for n in range(1, 10)]
    chosen: dict[int, Measured[float]] = {}
    for _ in range(2):
        left = [each for each in found if each.options.key.num_out not in chosen]
        chosen |= choices(FakeMeter(compile_s=5.0), left)
    assert len(chosen) == len(found)


def test_every_layer_is_launched() -> None:
    launched: list[int] = []

    def run(layer: int, config: float) -> float:
        launched.append(layer)
        return config

    each = asked(512, 2.0, 1.0)
    each.launches[:] = [partial(run, layer) for layer in range(3)]
    choices(FakeMeter(), [each])
    assert set(launched) == {0, 1, 2}


class Others:
    """Ranks of which this is another one than rank 0, whose tensors lie here."""

    def __init__(self, first: Tensor) -> None:
        self._first = first

    def of_first(self, x: Tensor) -> Tensor:
        assert x.shape == self._first.shape
        return self._first


def test_ranks_of_one_model_choose_what_rank_0_has_found() -> None:
    """Whatever they have found themselves, in the time that each had."""
    products = [asked(1, 9.0, 8.0), asked(2, 9.0, 7.0), asked(3, 9.0, 6.0)]
    keys = [each.options.key for each in products]
    found = {keys[0]: Measured(8.0, 8.0, 9.0), keys[1]: Measured(9.0, 9.0, 9.0)}
    alone = chosen_by_first(products, found, ALONE)
    assert {key: each.config for key, each in alone.items()} == {keys[0]: 8.0, keys[1]: 9.0}
    others: Any = Others(torch.tensor([0, -1, 1]))
    chosen = chosen_by_first(products, found, others)
    assert {key: each.config for key, each in chosen.items()} == {keys[0]: 9.0, keys[2]: 6.0}
