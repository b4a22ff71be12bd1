"""What every runner promises beside the right tokens.

A test module has a class of its own that inherits the tests, and gives two fixtures, `folder`
(the tiny llama with `sizes`) and `load` (load(folder, **settings) makes a HandScheduler on a runner
of that folder, with pages of 8 tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from common.messages.sampling import SamplingParams
from services.compute.runner.protocol import Runner, SlotErrors
from services.compute.step import StepPlan
from tests.unit.compute.hand_scheduler import GREEDY, HandScheduler
from tests.unit.compute.tiny_models import VOCAB_SIZE, greedy_ids, make_model, save_model

PROMPT = [5, 17, 42, 9, 101, 3, 77, 60, 31]

Load = Callable[..., HandScheduler]


class Refusing:
    """Does what an engine does with newcomers that a runner refuses."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.refused: list[int] = []
        self.spec, self.sample, self.result = runner.spec, runner.sample, runner.result
        self.ready, self.close = runner.ready, runner.close
        self.transfer, self.transferred = runner.transfer, runner.transferred

    def forward(self, plan: StepPlan) -> Any:
        try:
            return self.runner.forward(plan)
        except SlotErrors as errors:
            self.refused += errors.by_slot
            return self.runner.forward(plan.without_settings(errors.by_slot))


class FewSteps:
    """The promises that a few steps show."""

    num_reuses = 12
    sizes: ClassVar[Mapping[str, Any]] = {}

    def test_an_id_outside_the_vocabulary_breaks_its_step_only(
        self, load: Load, folder: Path
    ) -> None:
        hand = load(folder)
        good = hand.add(PROMPT)
        hand.run(good, 3)
        for bad in (VOCAB_SIZE, -2):
            with pytest.raises(ValueError, match="token ids must be in"):
                hand.step((hand.add([bad, 4]), 2))
        assert hand.run(good, 12) == greedy_ids(make_model("llama", **self.sizes), PROMPT, 12)

    def test_settings_that_cannot_be_taken_are_told_before_anything_is_launched(
        self, load: Load, folder: Path
    ) -> None:
        """The plan comes again without them, beside transfers both ways."""
        hand = load(folder, swap_space=0.01)
        first, away = hand.add(PROMPT), hand.add(PROMPT)
        hand.run(first, 3)
        hand.run(away, 3)
        hand.step((away, 1), swap_out=(first,))
        refusing = Refusing(hand.runner)
        hand.runner = refusing
        bad = hand.add(PROMPT, choice=1 << 70)
        penalised = hand.add(PROMPT, replace(GREEDY, frequency_penalty=1e-6))
        hand.step((first, 1), (bad, 9), (penalised, 9), swap_out=(away,))
        assert refusing.refused == [bad.slot]
        hand.runner = refusing.runner
        expected = greedy_ids(make_model("llama", **self.sizes), PROMPT, 6)
        for sequence in (first, away, penalised):
            assert hand.run(sequence, 6) == expected

    def test_a_broken_sequence_fails_alone_and_poisons_no_page_for_later_ones(
        self, load: Load, tmp_path: Path
    ) -> None:
        model = make_model("llama", **self.sizes)
        expected = greedy_ids(model, PROMPT, 20)
        assert 190 not in expected
        with torch.no_grad():
            model.get_input_embeddings().weight[190] = torch.nan
        hand = load(save_model(model, tmp_path), max_batched_token_mem=512)
        good, bad = hand.add(PROMPT), hand.add([190] * 30)
        result = hand.step((good, len(PROMPT)), (bad, 30))
        assert result.nonfinite.tolist() == [False, True]
        assert result.n_valid.tolist() == [1, 0]
        for number in range(
            self.num_reuses
        ):  # every page the broken one had comes back half filled
            hand.free_pages += bad.pages
            bad.pages = []
            again = hand.add(PROMPT[: 3 + number % 5], replace(GREEDY, logit_bias=((190, -1e4),)))
            hand.run(again, 2)
            assert not any(r.nonfinite.any() for r in hand.results[1:])
            hand.free_pages = again.pages + hand.free_pages
            hand.sequences.pop()
        assert hand.run(good, 20) == expected

    def test_penalties_know_tokens_that_the_host_does_not_know_yet(
        self, load: Load, folder: Path
    ) -> None:
        sampling = replace(GREEDY, frequency_penalty=200.0, logit_bias=((7, 1e3), (8, 1e3)))
        hand = load(folder)
        sequence = hand.add(PROMPT, sampling)
        first = hand.launch((sequence, len(PROMPT)))
        second = hand.launch((sequence, 1))
        third = hand.launch((sequence, 1))
        for launched in (first, second, third):
            hand.finish(launched)
        assert sorted(sequence.output) in ([7, 7, 8], [7, 8, 8])

    def test_logprobs_are_of_the_raw_distribution(self, load: Load, folder: Path) -> None:
        model = make_model("llama", **self.sizes)
        hand = load(folder)
        sampling = replace(GREEDY, logit_bias=((7, 1000.0),), num_logprobs=3)
        hand.step(
            (hand.add(PROMPT, GREEDY), len(PROMPT)), (hand.add(PROMPT, sampling), len(PROMPT))
        )
        (result,) = hand.results
        with torch.inference_mode():
            raw = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
        assert list(result.logprobs) == [1]
        (entry,) = result.logprobs[1]
        assert entry.chosen == pytest.approx(float(raw[7]), abs=1e-4)
        assert entry.top_ids == tuple(raw.topk(3).indices.tolist())
        assert entry.top_logprobs == pytest.approx(raw.topk(3).values.tolist(), abs=1e-4)

    def test_pages_go_and_come_back_without_a_step(self, load: Load, folder: Path) -> None:
        """Through other pages, and one right behind the other."""
        hand = load(folder, swap_space=0.01)
        sequence = hand.add(PROMPT)
        hand.run(sequence, 5)
        hand.swap_out(sequence)
        hand.swap_in(sequence)
        assert hand.run(sequence, 12) == greedy_ids(make_model("llama", **self.sizes), PROMPT, 12)

    def test_what_a_transfer_reads_stays_until_it_is_ready(self, load: Load, folder: Path) -> None:
        """Steps meanwhile write to all other pages that there are."""
        hand = load(folder, swap_space=0.01, max_batched_token_mem=40)
        away, other = hand.add(PROMPT), hand.add(PROMPT[::-1])
        hand.run(away, 5)
        hand.step((other, len(PROMPT)), swap_out=(away,))
        hand.run(other, 22)
        assert other.output == greedy_ids(make_model("llama", **self.sizes), PROMPT[::-1], 22)
        other_pages, other.pages = other.pages, []
        hand.free_pages += other_pages
        assert hand.run(away, 12) == greedy_ids(make_model("llama", **self.sizes), PROMPT, 12)


class RunnerPromises(FewSteps):
    """All of them."""

    def test_a_step_without_samples_fills_the_cache(self, load: Load, folder: Path) -> None:
        hand = load(folder)
        sequence = hand.add(PROMPT)
        result = hand.step((sequence, 4))
        assert result.tokens.shape == (0, 1)
        assert hand.run(sequence, 12) == greedy_ids(make_model("llama", **self.sizes), PROMPT, 12)

    def test_a_slot_forgets_the_sequence_before(self, load: Load, folder: Path) -> None:
        hand = load(folder)
        biased = replace(GREEDY, logit_bias=((7, 1000.0),), frequency_penalty=1.0)
        first = hand.add(PROMPT, biased)
        assert hand.run(first, 4) == [7] * 4
        hand.sequences.clear()
        assert hand.run(hand.add(PROMPT), 12) == greedy_ids(
            make_model("llama", **self.sizes), PROMPT, 12
        )

    def test_noise_counts_from_the_start_of_the_request_wherever_it_goes_on(
        self, load: Load, folder: Path
    ) -> None:
        sampling = SamplingParams(max_tokens=100, seed=11, temperature=1.0)
        hand = load(folder)
        whole = hand.run(hand.add(PROMPT, sampling), 20)
        later = load(folder)
        assert later.run(later.add(PROMPT, sampling, output=whole[:8]), 20) == whole
        other = hand.run(hand.add(PROMPT, sampling, choice=1), 20)
        assert other != whole
