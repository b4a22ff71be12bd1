"""What every runner has to get right in float32 greedy decoding, however the steps are cut.

A test module has a class of its own that inherits the tests, and gives two fixtures, `hand`
(a HandScheduler on a fresh runner) and `expected` (what transformers generates for each of PROMPTS,
COUNT tokens).
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.tiny_models import VOCAB_SIZE

PAGE_TOKENS = 8
COUNT = 16


def prompt_of(length: int, seed: int) -> list[int]:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


PROMPTS = [prompt_of(length, length) for length in (5, 8, 37, 61)]


class MixedSteps:
    """Two scenarios whose steps are of all kinds."""

    def test_chunks_of_one_prompt_beside_decoding_others(
        self, hand: HandScheduler, expected
    ) -> None:
        first, second, third = (hand.add(prompt) for prompt in PROMPTS[1:])
        hand.step((first, len(first.prompt)))
        hand.step((first, 1), (second, 9))
        hand.step((first, 1), (third, 20), (second, 28))
        hand.run_all(COUNT, chunk=11)
        assert [s.output[:COUNT] for s in (first, second, third)] == expected[1:]

    def test_a_prefix_is_read_in_the_step_that_computes_it(
        self, hand: HandScheduler, expected
    ) -> None:
        """By a chunk and by a row of one token, which comes before the row that it reads of."""
        first = hand.add(PROMPTS[3])
        again = hand.add(PROMPTS[3], shared=(first, 7))
        shorter = hand.add(PROMPTS[3][:57], shared=(first, 7))
        hand.step((first, 61), (again, 5), (shorter, 1))
        alone = hand.add(PROMPTS[3][:57])
        hand.run_all(COUNT)
        assert first.output == again.output == expected[3]
        assert shorter.output[:COUNT] == alone.output


class RunnerScenarios(MixedSteps):
    """All of them."""

    def test_a_sequence_alone(self, hand: HandScheduler, expected) -> None:
        for prompt, ids in zip(PROMPTS, expected, strict=True):
            assert hand.run(hand.add(prompt), COUNT) == ids

    def test_sequences_of_different_lengths_together(self, hand: HandScheduler, expected) -> None:
        sequences = [hand.add(prompt) for prompt in PROMPTS]
        hand.run_all(COUNT)
        assert [s.output for s in sequences] == expected

    @pytest.mark.parametrize("chunk", [1, 7, 8, 16])
    def test_a_prompt_in_chunks(self, hand: HandScheduler, expected, chunk: int) -> None:
        assert hand.run(hand.add(PROMPTS[3]), COUNT, chunk) == expected[3]

    def test_a_shared_prefix_is_not_computed_again(self, hand: HandScheduler, expected) -> None:
        first = hand.add(PROMPTS[3])
        hand.run(first, COUNT)
        again = hand.add(PROMPTS[3], shared=(first, len(PROMPTS[3]) // PAGE_TOKENS))
        assert again.computed == 56
        both = hand.add(PROMPTS[3], shared=(first, 2))
        while len(both.output) < COUNT:
            hand.step(*((s, hand.next_queries(s, 30)) for s in (again, both)))
        assert again.output[:COUNT] == both.output == expected[3]

    def test_a_generated_prefix_is_shared_too(self, hand: HandScheduler, expected) -> None:
        first = hand.add(PROMPTS[2])
        hand.run(first, COUNT)
        longer = PROMPTS[2] + expected[2][:12]
        again = hand.add(longer, shared=(first, len(longer) // PAGE_TOKENS))
        assert hand.run(again, COUNT - 12) == expected[2][12:]

    def test_a_sequence_goes_on_after_a_round_trip_to_the_host(
        self, hand: HandScheduler, expected
    ) -> None:
        away, other = hand.add(PROMPTS[2]), hand.add(PROMPTS[3])
        hand.run(away, 9)
        hand.step((other, len(other.prompt)), swap_out=(away,))
        hand.run(other, COUNT)
        assert hand.run(away, COUNT) == expected[2]
        assert other.output == expected[3]

    def test_a_sequence_goes_on_after_preemption_by_recompute(
        self, hand: HandScheduler, expected
    ) -> None:
        first = hand.add(PROMPTS[2])
        hand.run(first, 9)
        again = hand.add(PROMPTS[2], output=first.output)
        assert hand.run(again, COUNT, chunk=20) == expected[2]

    def test_the_next_step_is_launched_before_the_last_ones_tokens_are_known(
        self, hand: HandScheduler, expected
    ) -> None:
        sequences = [hand.add(prompt) for prompt in PROMPTS]
        previous = hand.launch(*((s, len(s.prompt)) for s in sequences))
        for _ in range(COUNT - 1):
            ahead = hand.launch(*((s, 1) for s in sequences))
            hand.finish(previous)
            previous = ahead
        hand.finish(previous)
        assert [s.output for s in sequences] == expected
