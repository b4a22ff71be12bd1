from __future__ import annotations

import numpy as np
import pytest

from services.compute.speculative.acceptance import NO_DRAFT, accepted, accepted_synthetic


def test_rows_count_up_to_the_first_draft_that_is_wrong() -> None:
    numbers = np.array([0, 1, 2, 3, 0, 0, 1, 0, 1])
    drafts = np.array([NO_DRAFT, 5, 6, 7, NO_DRAFT, NO_DRAFT, 4, NO_DRAFT, NO_DRAFT])
    tokens = np.array([5, 9, 7, 1, 2, 3, 4, 8, 0])  # 6 was guessed where 9 was drawn
    expected = [True, True, False, False, True, True, False, True, False]
    assert accepted(tokens, numbers, drafts).tolist() == expected


def test_of_synthetic_drafts_a_share_counts() -> None:
    numbers = np.tile([0, 1], 4000)
    indices, slots = np.arange(8000), np.repeat(np.arange(4000) % 64, 2)
    for rate in (0.0, 0.7, 1.0):
        counts = accepted_synthetic(indices, slots, numbers, rate)
        assert counts[::2].all()
        assert counts[1::2].mean() == pytest.approx(rate, abs=0.03)
