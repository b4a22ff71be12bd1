"""No runner takes an id that its vocabulary lacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.compute.runner.protocol import check_tokens
from services.compute.step import StepPlan
from tests.unit.compute.step_plans import PlanSizes, random_plan


def with_tokens(*tokens: int) -> StepPlan:
    plan = random_plan(PlanSizes(1), 1)
    return replace(plan, step_id=7, tokens=np.array(tokens, dtype=np.int32))


@pytest.mark.parametrize("tokens", [(0, 1, 99), (-1, -1), (-1, 99)])
def test_ids_of_the_vocabulary_and_tokens_on_the_device_may_come_in(
    tokens: tuple[int, ...],
) -> None:
    check_tokens(with_tokens(*tokens), 100)


@pytest.mark.parametrize("tokens", [(0, 100), (-2, 5), (2**31 - 1,), (-(2**31), 3)])
def test_an_id_outside_the_vocabulary_names_step_and_range(tokens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"step 7: token ids must be in 0 \.\. 99, not"):
        check_tokens(with_tokens(*tokens), 100)


def test_a_plan_without_tokens_passes_the_check() -> None:
    check_tokens(with_tokens(), 100)
