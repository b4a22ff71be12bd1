"""By rejection a text has the model's distribution, whatever the drafts were drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.compute.sampling.noise import coordinates, draw_everywhere
from services.compute.sampling.rejection import ACCEPTANCE, DRAFT, RESIDUAL, draw_or_reject

NUM_ROWS = 40_000
P = (0.4, 0.3, 0.2, 0.1, 0.0)


def distribution(p: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(p).log().expand(NUM_ROWS, -1)


def noise(stream: int) -> torch.Tensor:
    seeds = np.arange(NUM_ROWS)
    return coordinates(seeds, np.full(NUM_ROWS, 3 + stream), np.full(NUM_ROWS, 7))


@pytest.mark.parametrize(
    "q", [P, (0.1, 0.2, 0.3, 0.1, 0.3), (0.0, 0.0, 0.0, 0.0, 1.0), (0.5, 0.0, 0.5, 0.0, 0.0)]
)
def test_tokens_have_the_models_distribution_and_as_many_drafts_count_as_can(
    q: tuple[float, ...],
) -> None:
    drafts_R = draw_everywhere(distribution(q), noise(DRAFT))
    tokens_R = draw_or_reject(
        distribution(P), distribution(q), drafts_R, noise(ACCEPTANCE), noise(RESIDUAL)
    )
    expected = torch.tensor(P) * NUM_ROWS
    counts = torch.bincount(tokens_R, minlength=len(P))
    assert counts[4] == 0
    chi_square = ((counts - expected)[:4] ** 2 / expected[:4]).sum()
    assert chi_square < 16.3  # of three degrees of freedom: 0.1 % of seeds are above
    share = sum(map(min, P, q))  # one less the distance of the distributions
    deviation = (share * (1 - share) / NUM_ROWS) ** 0.5
    assert abs((tokens_R == drafts_R).float().mean() - share) <= 4 * deviation
