"""The worker names masks, and names none that is not whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from common.messages.sampling import GrammarSpec
from services.compute.grammar import mask_worker
from services.compute.grammar.backend import GrammarBackend
from services.compute.grammar.mask_worker import MaskWorker
from services.compute.grammar.protocol import (
    AcceptTokens,
    GrammarSettings,
    MaskMemory,
    MasksWritten,
    Order,
    Report,
    SequenceFailed,
    StartSequence,
)
from tests.flow.structured_ring import EOS, VOCAB_SIZE, save_tokenizer, tokenizer
from tests.unit.compute.grammar.structured_plans import make_start, tokens_in

NUM_SLOTS = 200
NEVER_S = 0.5
"""Of processor time: no mask here takes it, where a collection of garbage can take 2 ms."""


class Desk:
    """A worker on its own, and what every mask was when it was named."""

    def __init__(self, folder: Path) -> None:
        settings = GrammarSettings(
            folder=str(save_tokenizer(folder)),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            num_slots=NUM_SLOTS,
        )
        self.memory = MaskMemory.create(NUM_SLOTS, VOCAB_SIZE)
        self.memory.masks_PNW[:] = -1
        self.named: dict[tuple[int, int, int], set[int]] = {}
        self.forced: dict[int, list[int]] = {}  # before the mask named last, by slot
        self.failed: list[int] = []
        self.handed_over: list[Order] = []
        self.worker = MaskWorker(
            settings,
            GrammarBackend(settings),
            self.memory,
            self._reported,
            1,
            self.handed_over.append,
        )

    def _reported(self, report: Report) -> None:
        if isinstance(report, MasksWritten):
            for slot, plane, epoch, index, count, *forced in self.memory.named().tolist():
                assert plane == 1
                mask_W = self.memory.masks_PNW[plane, slot]
                self.named[slot, epoch, index] = tokens_in(mask_W)
                self.forced[slot] = forced[:count]
        elif isinstance(report, SequenceFailed):
            self.failed.append(report.slot)

    def place(self, slot: int, grammar: str) -> None:
        self.worker.take(make_start(GrammarSpec(grammar), slot=slot))

    def advance(self, index: int, *drawn: tuple[int, int]) -> None:
        rows = [(slot, 1, index, token) for slot, token in drawn]
        self.worker.take(AcceptTokens(np.array(rows, dtype=np.int32)))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(mask_worker, "SLOW_S", NEVER_S)
    return Desk(tmp_path)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text).ids)


def settle(desk: Desk, grammar: str) -> None:
    """Compile, so that placing needs no other thread."""
    desk.worker._backend.compile(grammar)


def test_masks_are_named_when_they_are_whole_and_each_once(desk: Desk) -> None:
    grammar = 'start: ("a" | "b") ("b" | "c") ("c" | "d")\n'
    settle(desk, grammar)
    a, b, c, d = ids_of("abcd")
    for slot in range(NUM_SLOTS):
        desk.place(slot, grammar)
    assert desk.named == {(slot, 1, 0): {a, b} for slot in range(NUM_SLOTS)}
    desk.named.clear()
    desk.advance(0, *((slot, a) for slot in range(NUM_SLOTS)))
    assert desk.named == {(slot, 1, 1): {b, c} for slot in range(NUM_SLOTS)}
    desk.named.clear()
    desk.advance(1, (7, b), (9, c))
    assert desk.named == {(7, 1, 2): {c, d}, (9, 1, 2): {c, d}}


def test_it_goes_ahead_where_there_is_one_choice_only(desk: Desk) -> None:
    grammar = 'start: "a" "b" ("c" | "d") "a" "b"\n'
    settle(desk, grammar)
    a, b, c, d = ids_of("abcd")
    desk.place(0, grammar)
    assert (desk.named, desk.forced[0]) == ({(0, 1, 2): {c, d}}, [a, b])
    desk.named.clear()
    desk.advance(0, (0, a))
    desk.advance(1, (0, b))
    assert desk.named == {}
    desk.advance(2, (0, d))  # the end is the only choice behind the last, too, but goes nowhere
    assert (desk.named, desk.forced[0]) == ({(0, 1, 5): {EOS}}, [a, b])
    desk.advance(3, (0, c))
    assert desk.failed == [0]


def test_what_it_cannot_go_ahead_by_fails_when_it_comes(desk: Desk) -> None:
    grammar = 'start: "a" "b"\n'
    settle(desk, grammar)
    a, b, _, _ = ids_of("abcd")
    banned = GrammarSpec(grammar, banned_sequences=((a, b),))
    desk.worker.take(make_start(banned))
    assert (desk.named, desk.forced[0], desk.failed) == ({(0, 1, 0): {a}}, [], [])
    desk.advance(0, (0, a))
    assert desk.failed == [0]


def test_a_sequence_that_ends_or_fails_has_no_mask_named(desk: Desk) -> None:
    grammar = 'start: ("a" | "c") ("b" | "d")\n'
    settle(desk, grammar)
    a, b, _, d = ids_of("abcd")
    for slot in range(3):
        desk.place(slot, grammar)
    desk.named.clear()
    desk.advance(0, (0, EOS), (1, b), (2, a))
    assert desk.named == {(2, 1, 1): {b, d}}
    assert desk.failed == [1]


GRAMMAR = 'start: ("a" | "b") ("b" | "c") ("c" | "d")\n'


def test_a_sequence_whose_mask_takes_long_is_handed_over_and_its_tokens_after_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(desk, GRAMMAR)
    a, b, _, _ = ids_of("abcd")
    desk.place(0, GRAMMAR)
    monkeypatch.setattr(mask_worker, "SLOW_S", 0.0)
    desk.advance(0, (0, a))
    monkeypatch.setattr(mask_worker, "SLOW_S", NEVER_S)
    desk.advance(1, (0, b))
    start, tokens = desk.handed_over
    assert isinstance(start, StartSequence) and isinstance(tokens, AcceptTokens)
    assert (start.slot, start.output_ids) == (0, (a,))
    assert tokens.rows_R4.tolist() == [[0, 1, 1, b]]


def test_a_process_that_did_not_run_meanwhile_is_not_slow(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(desk, GRAMMAR)
    seconds = itertools.count()
    monkeypatch.setattr(mask_worker, "monotonic", lambda: float(next(seconds)))
    for slot in range(NUM_SLOTS):
        desk.place(slot, GRAMMAR)
    desk.advance(0, *((slot, ids_of("a")[0]) for slot in range(NUM_SLOTS)))
    assert len(desk.named) == 2 * NUM_SLOTS and desk.handed_over == []
