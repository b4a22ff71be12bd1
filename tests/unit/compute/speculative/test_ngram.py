from __future__ import annotations

import pytest

from common.speculative import SpeculativeSettings
from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.speculative.draft_counts import NGRAM, PREDICTION
from services.compute.speculative.ngram import NgramDrafter
from services.compute.step import NO_IDS, int32_array

FOUR = SpeculativeSettings(num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7, 8, 1, 2, 3, 4, 5, 7, 8], [1, 2, 3, 4]),
        ([7, 8, 1, 9, 8, 2, 7, 8], [1, 9, 8, 2]),  # two alike go before one
        ([7, 8, 1, 7, 8, 2, 7, 8], [2, 7, 8]),  # of several the last; no further than the text
        ([5, 5, 5], [5]),
        ([9, 8, 1, 7, 8], []),  # one alike is too few
        ([1], []),
        ([1, 2, 3], []),
    ],
)
def test_drafts_are_what_followed_the_last_tokens_before(
    ids: list[int], expected: list[int]
) -> None:
    assert drafted(ids[:-1], [], ids[-1:]) == [expected]


def drafted(prompt: list[int], prediction: list[int], *steps: list[int]) -> list[list[int]]:
    """The drafts after each step's tokens; those from the prediction begin with a minus."""
    drafter = NgramDrafter(1, 24, FOUR)
    entry = SlotEntry(0, False, int32_array(prompt), *[NO_IDS] * 4, True, int32_array(prediction))
    drafter.enter(entry)
    found = []
    for tokens in steps:
        ids, by = drafter.extend(0, tokens)
        found.append([-ids[0], *ids[1:]] if by == PREDICTION else ids.tolist())
        assert by in (NGRAM, PREDICTION)
    return found


def test_a_prediction_is_followed_from_the_first_token_to_its_end() -> None:
    drafts = drafted([9], [1, 2, 3, 4, 5, 6], [1], [2, 3, 4], [5, 6])
    assert drafts == [[-2, 3, 4, 5], [-5, 6], []]


def test_a_prediction_is_found_again_behind_a_difference() -> None:
    drafts = drafted([9], [1, 2, 3, 4, 5, 6], [1], [7], [3], [4])
    assert drafts == [[-2, 3, 4, 5], [], [], [-5, 6]]


def test_of_places_alike_the_next_one_is_followed() -> None:
    """Lines that begin alike: what was followed last says which of them comes."""
    lines = [1, 2, 3, 5, 1, 2, 4, 6, 1, 2, 7, 8]
    drafts = drafted([9], lines, [1, 2, 3], [0], [1], [2], [4])
    assert drafts == [[-5, 1, 2, 4], [], [], [-4, 6, 1, 2], [-6, 1, 2, 7]]


def test_an_answer_may_grow_over_the_prediction_that_it_has_passed() -> None:
    prediction = [*range(10, 29)]  # as much as there is room for
    steps = [prediction[place : place + 3] for place in range(0, 18, 3)]
    drafts = drafted([1, 2, 3, 4, 5], prediction, *steps)
    assert drafts == [
        [-following[0], *following[1:]]
        for place in range(3, 21, 3)
        for following in [prediction[place : place + 4]]
    ]
