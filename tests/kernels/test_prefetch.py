"""What a launch asks the L2 cache for beside its work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.kernels import launch
from services.compute.kernels.launch import PREFETCH_CHUNK, Prefetch, prefetch_planes

CHUNK = PREFETCH_CHUNK.value


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that has the instruction."""
    monkeypatch.setattr(launch, "can_prefetch", lambda _: True)


def test_on_the_cpu_nothing_is_asked_for_and_a_grid_has_no_programs_more() -> None:
    ahead = Prefetch.of(torch.zeros(64, 64), 1 << 20)
    assert ahead is None
    assert prefetch_planes(ahead, 3) == 0


@pytest.mark.usefixtures("asking")
def test_a_weight_is_asked_for_from_its_beginning() -> None:
    weight_OI = torch.zeros(64, 64)
    assert Prefetch.of(weight_OI, 4096) == (weight_OI.data_ptr(), 4096)
    assert Prefetch.of(weight_OI, 1 << 20) == (weight_OI.data_ptr(), weight_OI.nbytes)


@pytest.mark.usefixtures("asking")
def test_parts_of_16_bytes_are_left_out() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    assert Prefetch.of(memory[:47], 1 << 20) == (memory.data_ptr(), 32)
    assert Prefetch.of(memory[:15], 1 << 20) is None
    assert Prefetch.of(memory, 0) is None


@pytest.mark.usefixtures("asking")
def test_weights_that_begin_elsewhere_or_have_gaps_are_not_asked_for() -> None:
    memory = torch.zeros(64, 64, dtype=torch.uint8)
    assert Prefetch.of(memory.view(-1)[8:], 1 << 20) is None
    assert Prefetch.of(memory[:, :32], 1 << 20) is None


@given(st.integers(1, 1 << 26), st.integers(1, 128))
def test_there_are_programs_for_every_chunk_and_no_plane_too_many(
    num_bytes: int, num_rows: int
) -> None:
    num_planes = prefetch_planes(Prefetch(0, num_bytes), num_rows)
    assert num_planes * num_rows * CHUNK >= num_bytes
    assert (num_planes - 1) * num_rows * CHUNK < num_bytes
