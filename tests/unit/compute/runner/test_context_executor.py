"""Ranks that share the tokens of prompts say what one process says, whatever comes together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.config import ComputeSettings
from services.compute.distributed import context
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, NUM_OWN, NUM_TOKENS
from services.compute.models import weights
from services.compute.runner.context_executor import Dealer
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.slot_states import Rows, SlotStates
from services.compute.runner.uploads import NO_SLOT_ROWS, StepPacker, StepUpload, packed_size
from services.compute.step import Int32Array, PoolRow, ScoreRow, int32_array
from tests.cases import num_cases
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.distributed.rank_threads import RankThreads
from tests.unit.compute.distributed.served import DUMMY, HEARD_SCALE, SETTINGS, answers
from tests.unit.compute.engine_histories import play, random_history
from tests.unit.compute.engine_server import Server
from tests.unit.compute.models.family_models import FAMILIES, save_config
from tests.unit.compute.step_plans import PlanSizes, random_plan
from tests.unit.compute.tiny_models import make_model, save_model

CHUNKS = st.lists(st.integers(1, 12), max_size=6)
SLOTS = 32


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes may have one token."""
    monkeypatch.setattr(context, "MIN_STRIPE", 1)


class Read:
    """One reader of uploads, and what it makes of them."""

    def __init__(self, dealer: Dealer | None) -> None:
        self._dealer = dealer
        self._states = SlotStates(SLOTS)
        self._buffer = np.zeros(packed_size(SLOTS, 200, 100, SLOTS), dtype=np.int32)

    def take(self, ints: Int32Array) -> tuple[StepUpload, Rows]:
        num_ints = len(ints)
        self._buffer[:num_ints] = ints
        if self._dealer is not None:
            num_ints = self._dealer.deal(self._buffer, num_ints)
        step = StepUpload.read(self._buffer[:num_ints].copy())
        return step, self._states.unpack(step)


def tokens_of(rows: Rows, tokens: range) -> list[tuple[int, int, int]]:
    """Slot, position and id of these tokens of a step."""
    row_T = np.repeat(np.arange(len(rows.slots_R)), rows.q_len_R)
    first_R = np.cumsum(rows.q_len_R) - rows.q_len_R
    positions_T = rows.q_start_R[row_T] + np.arange(len(row_T)) - first_R[row_T]
    columns = rows.slots_R[row_T], positions_T, rows.tokens_T
    return [tuple(int(column[token]) for column in columns) for token in tokens]  # type: ignore[misc]


@given(st.lists(st.tuples(st.integers(0, 4), CHUNKS), min_size=1, max_size=4), st.integers(2, 4))
@pytest.mark.usefixtures("short")
def test_shares_of_any_steps_are_the_steps(
    sizes: list[tuple[int, list[int]]], num_ranks: int
) -> None:
    """All sample the same, and what ranks have in common and alone is what there was."""
    packer, whole = StepPacker(SLOTS), Read(None)
    ranks = [Read(Dealer(rank, num_ranks)) for rank in range(num_ranks)]
    for seed, (num_decodes, chunks) in enumerate(sizes):
        plan = random_plan(PlanSizes(num_decodes, tuple(chunks), num_page_entries=9), seed=seed)
        buffer = np.zeros(packed_size(SLOTS, 200, 100, SLOTS), dtype=np.int32)
        ints = buffer[: packer.pack(plan, NO_SLOT_ROWS, buffer)]
        if not plan.num_rows:
            continue
        step, rows = whole.take(ints)
        shares = [rank.take(ints) for rank in ranks]
        expected = sorted(tokens_of(rows, range(step.header[NUM_TOKENS])))
        num_own, num_tokens = shares[0][0].header[NUM_OWN], shares[0][0].header[NUM_TOKENS]
        found = tokens_of(shares[0][1], range(num_tokens - num_own))
        for share, its_rows in shares:
            assert (share.header[NUM_OWN], share.header[NUM_TOKENS]) == (num_own, num_tokens)
            found += tokens_of(its_rows, range(num_tokens - num_own, num_tokens))
            assert share.header[NUM_DECODE_ROWS] == num_decodes
            assert np.array_equal(its_rows.slot_S, rows.slot_S)
            assert np.array_equal(its_rows.index_S, rows.index_S)
            last_S = np.cumsum(its_rows.q_len_R)[its_rows.sample_row_S] - 1
            assert not len(last_S) or last_S.max() < num_tokens - num_own
            for name in ("states", "page_slot", "page_index", "page_id", "slot_rows"):
                assert np.array_equal(share.section(name), step.section(name))
        assert sorted(found) == expected


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ["scores", "pools"])
def test_a_step_whose_rows_are_read_as_a_whole_is_not_dealt(kind: str) -> None:
    plan = random_plan(PlanSizes(0, (12, 12)), seed=1)
    scored = replace(plan, scores=(ScoreRow(0, 2, int32_array([5, 6])),))
    pooled = replace(plan, pools=(PoolRow(1, ends=True),))
    packer, dealer = StepPacker(SLOTS), Read(Dealer(1, 2))
    for dealt, each in ((True, plan), (False, scored if kind == "scores" else pooled)):
        buffer = np.zeros(packed_size(SLOTS, 200, 100, SLOTS), dtype=np.int32)
        step, rows = dealer.take(buffer[: packer.pack(each, NO_SLOT_ROWS, buffer)])
        assert bool(step.header[NUM_OWN]) is dealt
    assert rows.q_len_R.tolist() == [12, 12]
    assert [(row.row, row.num_top) for row in step.scores()] == [(0, 2)][: kind == "scores"]
    assert [pool.row for pool in step.pools()] == [1][: kind == "pools"]


@contextmanager
def sharing(folder: Path, settings: ComputeSettings, size: int) -> Iterator[PackingRunner]:
    """The model on so many ranks, which end with the same logits."""
    settings = settings.model_copy(update={"prefill_context_parallel_size": size})
    ranks = RankThreads(folder, settings, size)
    try:
        yield PackingRunner(ranks)
    finally:
        ranks.close()
    for rank in range(1, size):
        assert all(map(torch.equal, ranks.logits[0], ranks.logits[rank]))
        assert len(ranks.logits[0]) == len(ranks.logits[rank])


NAMES = ["gpt-oss", "deepseek v3"]
"""Windows, sinks and experts; latents, and experts again."""


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", [*NAMES, *sorted(set(FAMILIES) - set(NAMES))][: num_cases(2, 99)])
def test_three_ranks_say_what_one_process_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SCALE", HEARD_SCALE)
    folder = save_config(name, tmp_path)
    one = answers(load_on_cpu(folder, DUMMY), DUMMY)
    with sharing(folder, DUMMY, 3) as runner:
        assert answers(runner, DUMMY).tokens == one.tokens


@pytest.mark.usefixtures("short")
def test_any_history_says_what_it_says_in_one_process(tmp_path: Path) -> None:
    """Through prefixes that are found, chunks, and preemptions."""
    folder = save_model(make_model("qwen3"), tmp_path)
    more = SETTINGS.model_copy(update={"max_batched_token_mem": 160, "max_prefill_tokens": 24})
    history = random_history(5, 24, greedy=True)
    with sharing(folder, more, 2) as runner:
        shared, one = Server(runner, more), Server(load_on_cpu(folder, more), more)
        for server in (shared, one):
            play(server, history)
            assert server.scheduler.stats().preemptions_total > 0
    for ask in history:
        for counter in ask.counters if ask.leaves_at is None else ():
            assert shared.tokens[counter] == one.tokens[counter]
