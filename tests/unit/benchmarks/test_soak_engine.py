"""The soak in process, short, on the virtual device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_models import NUM_SPECIAL, SHAPES, make_folder
from benchmarks.soak_engine import EngineSoak
from benchmarks.soak_requests import Mix
from services.compute.config import ComputeSettings

SHAPE = SHAPES["tiny"]
SETTINGS = ComputeSettings(
    device="sim", max_model_len=1024, max_batched_token_mem=1280, sim_step_base_s=0.0
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineSoak]:
    folder = make_folder(tmp_path / "tiny", SHAPE)
    mix = Mix("tiny", 1, 256, SHAPE.vocab_size - NUM_SPECIAL)
    engine = EngineSoak(folder, mix, SETTINGS)
    yield engine
    engine.close()


def test_aborts_and_preemptions_leave_nothing_and_every_answer_can_be_had_again(
    engine: EngineSoak,
) -> None:
    engine.run(range(600), 64, lambda number: number % 10 == 0)
    tally = engine.tally
    assert tally.problems == []
    assert tally.num_sequences >= 600
    assert tally.num_aborted > 50
    assert engine.stats().preemptions_total > 10
    assert engine.stats().cached_tokens_total > 1000
    assert engine.leftovers() == []
    assert len(tally.kept) > 30
    assert engine.ask_alone() == []


def test_what_is_open_is_found(engine: EngineSoak) -> None:
    def enough(_: object) -> bool:
        if engine.tally.num_steps == 20:
            found.extend(engine.leftovers())
        return True

    found: list[str] = []
    engine.run(range(40), 16, lambda number: False, enough)
    assert any("are running" in each for each in found)
    assert any("pages are free" in each for each in found)
    assert engine.leftovers() == []


def test_tokens_that_are_not_the_same_again_are_found(engine: EngineSoak) -> None:
    engine.run(range(20), 4, lambda number: True)
    changed = next(iter(engine.tally.kept))
    engine.tally.kept[changed][-1] += 1
    assert engine.ask_alone() == [changed // 8]
