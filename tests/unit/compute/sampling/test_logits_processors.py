"""top_k, top_p and min_p keep the ids that transformers keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from services.compute.sampling import logits_processors
from services.compute.sampling.logits_processors import apply_min_p, apply_top_k, apply_top_p


def logits_of(seed: int, rows: int, vocab_size: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * spread
    return logits - logits.amax(-1, keepdim=True)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60), st.floats(0.1, 8.0))
def test_top_k_is_that_of_transformers(seed: int, k: int, spread: float) -> None:
    logits = logits_of(seed, 3, 50, spread)
    expected = TopKLogitsWarper(k)(torch.zeros(3, 0), logits)
    apply_top_k(logits, np.array([k] * 3))
    assert torch.equal(logits, expected)


def test_equals_at_the_boundary_of_top_k_stay() -> None:
    logits = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    apply_top_k(logits, np.array([2]))
    assert logits.isfinite().tolist() == [[True, True, True, True, False]]


def test_each_row_has_its_own_k() -> None:
    logits = logits_of(1, 4, 50, 2.0)
    apply_top_k(logits, np.array([1, 7, 50, 3]))
    assert logits.isfinite().sum(-1).tolist() == [1, 7, 50, 3]


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 0.999), st.floats(0.1, 8.0))
def test_top_p_is_that_of_transformers(seed: int, p: float, spread: float) -> None:
    logits = logits_of(seed, 3, 50, spread)
    expected = TopPLogitsWarper(p)(torch.zeros(3, 0), logits)
    probabilities = logits.softmax(-1).double()
    apply_top_p(logits, np.array([p] * 3))
    differs = logits.isfinite() != expected.isfinite()
    # they add up in float32: an id whose mass ends within rounding of p may fall either way
    for row, column in differs.nonzero().tolist():
        before = float(probabilities[row][probabilities[row] > probabilities[row, column]].sum())
        assert before == pytest.approx(p, abs=1e-5)


def test_top_p_of_zero_keeps_the_first() -> None:
    logits = torch.tensor([[-0.5, 0.0, -1.0]])
    apply_top_p(logits, np.array([0.0]))
    assert logits.isfinite().tolist() == [[False, True, False]]


def test_top_p_looks_further_where_the_first_candidates_do_not_hold_the_mass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaked, flat = logits_of(2, 2, 400, 6.0), logits_of(3, 2, 400, 0.01)
    logits = torch.cat((peaked, flat))
    whole = logits.clone()
    apply_top_p(whole, np.array([0.9] * 4))
    monkeypatch.setattr(logits_processors, "FIRST_CANDIDATES", 8)
    apply_top_p(logits, np.array([0.9] * 4))
    assert torch.equal(logits, whole)
    assert logits[2].isfinite().sum() > 300


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0.001, 1.0), st.floats(0.1, 8.0))
def test_min_p_is_that_of_transformers(seed: int, p: float, spread: float) -> None:
    logits = logits_of(seed, 3, 50, spread)
    expected = MinPLogitsWarper(p)(torch.zeros(3, 0), logits)
    ratios = logits.exp()
    apply_min_p(logits, np.log([p] * 3).astype(np.float32))
    differs = logits.isfinite() != expected.isfinite()
    assert bool((ratios[differs] - p).abs().lt(1e-5).all())


def test_rows_without_min_p_are_whole() -> None:
    logits = logits_of(4, 2, 50, 8.0)
    apply_min_p(logits, np.array([-np.inf, np.log(0.5)], dtype=np.float32))
    assert bool(logits[0].isfinite().all())
    assert not bool(logits[1].isfinite().all())
