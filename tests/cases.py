"""Generated cases: the same ones in every run, and new ones in `make fuzz`.

`make test` judges a change by cases that do not depend on luck, on the machine or on what else ran
in the process. `make fuzz` runs the same tests with the profile `fuzz` and a seed that it prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# No deadline and no complaint of slowness: speed is judged by benchmarks. No database: what was
# found on one machine is a case of its own in the code, or nowhere.
_STEADY = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("ours", _STEADY, max_examples=50)  # the same 50 in every run
settings.register_profile("fuzz", _STEADY, derandomize=False, print_blob=True)
settings.load_profile("ours")

# Hypothesis draws some values from the constants of the modules that a process has loaded so far:
# a test's cases would depend on the tests before it, and to look for them takes 0.8 s.
providers._get_local_constants = providers.Constants


def crossed(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return every combination on a GPU, and elsewhere so few that each value is in one."""
    import torch  # which tests without combinations do not load

    if torch.cuda.is_available():
        return list(product(*axes))
    longest = max(map(len, axes))
    return [tuple(axis[place % len(axis)] for axis in axes) for place in range(longest)]


def num_cases(usual: int, exploring: int) -> int:
    """Return how many cases a test tries: few in every run, more where `make fuzz` explores."""
    return usual if settings.default.derandomize else exploring
