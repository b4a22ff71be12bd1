"""Where nothing was drafted for long, drafts are looked for in every fourth step."""

from __future__ import annotations

import numpy as np

from common.speculative import SpeculativeSettings
from services.compute.kernels.sampling.slot_entries import SlotEntry, pack_entries
from services.compute.runner.eager_drafting import LOOK_EVERY, PATIENCE, EagerDrafting
from services.compute.runner.slot_states import NO_ROWS, SlotStates
from services.compute.speculative.ngram import NgramDrafter
from services.compute.step import NO_IDS, int32_array

SETTINGS = SpeculativeSettings(num_speculative_tokens=3)
ONE = np.zeros(1, dtype=np.int64)
COUNTS = np.ones(1, dtype=np.bool_)


class OneSlot:
    """A slot whose sequence goes on by a token a step."""

    def __init__(self, num_stages: int = 1) -> None:
        self.drafting = EagerDrafting(SETTINGS, NgramDrafter(1, 200, SETTINGS), num_stages)
        self.states = SlotStates(1, 3)

    def enter(self, prompt: list[int]) -> None:
        ids, buffer = int32_array(prompt), np.zeros(256, dtype=np.int32)
        entry = SlotEntry(0, False, ids, NO_IDS, NO_IDS, NO_IDS, NO_IDS, True, NO_IDS)
        self.drafting.enter(buffer[: pack_entries([entry], buffer)])

    def draw(self, token: int) -> list[int] | None:
        """The drafts that are found behind it, or None where nobody looked."""
        drawn = np.array([token], dtype=np.int64)
        num_found = self.drafting.draft(self.states, ONE, drawn, COUNTS).num_S
        if not len(num_found):
            return None
        drafts: list[int] = self.states.drafts_NK[0, : num_found[0]].tolist()
        return drafts

    def see_drafts(self) -> None:
        """A step has a row for a draft."""
        rows = NO_ROWS._replace(number_S=np.arange(2), draft_S=np.arange(2))
        self.drafting.accepted(rows, np.arange(2))


def idle_slot() -> OneSlot:
    slot = OneSlot()
    slot.enter([1, 2, 3, 4])
    assert [slot.draw(token) for token in range(100, 100 + PATIENCE)] == [[]] * PATIENCE
    return slot


def test_a_text_that_repeats_itself_at_last_is_found_a_few_steps_later() -> None:
    slot = idle_slot()
    looks = [slot.draw(token) for token in (1, 2, 3, 4)]
    assert looks == [None, None, None, [100, 101, 102]]
    assert LOOK_EVERY == len(looks)


def test_after_a_step_with_drafts_each_step_looks_again() -> None:
    slot = idle_slot()
    slot.see_drafts()
    assert [slot.draw(token) for token in (1, 2, 3)] == [[], [3, 4, 100], [4, 100, 101]]


def test_in_stages_as_many_steps_in_a_row_look_as_sequences_take_turns() -> None:
    slot = OneSlot(num_stages=2)
    slot.enter([1, 2, 3, 4])
    looks = [slot.draw(token) for token in range(100, 100 + 2 * PATIENCE + 4 * LOOK_EVERY)]
    rests = [None] * (2 * LOOK_EVERY - 2)
    assert looks == [[]] * 2 * PATIENCE + 2 * [*rests, [], []]


def test_what_was_not_read_yet_is_not_taken_for_the_next_sequence() -> None:
    slot = idle_slot()
    assert slot.draw(7) is None
    slot.enter([8, 9, 5, 6])
    assert [slot.draw(token) for token in (8, 9, 1)] == [None, None, []]
    slot.see_drafts()
    assert [slot.draw(token) for token in (7, 8, 9)] == [[], [], [1, 7, 8]]
