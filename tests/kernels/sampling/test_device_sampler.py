"""The whole of a step's sampling on the device, against the CPU's sampler on the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from common.messages.sampling import SamplingParams
from services.compute.kernels.sampling.logits_processors import SEEN_IN_PROMPT
from services.compute.kernels.sampling.logprobs import CHOSEN, TOP_IDS, TOP_LOGPROBS
from services.compute.kernels.step.slot_words import VOID_MASK
from services.compute.runner.uploads import pack_masks
from services.compute.sampling.device_sampler import DeviceSampler
from services.compute.sampling.sampler import Sampler
from services.compute.sampling.slots import SlotFlags, Variant, slots_of
from services.compute.step import (
    MAX_BIAS,
    SlotDelta,
    TokenMasks,
    int32_array,
    mask_words,
)
from tests.kernels.sampling_step import (
    NUM_SLOTS,
    SamplingStep,
    as_int64,
    make_step,
    place,
    random_logits,
    random_settings,
)
from tests.unit.compute.sampling_slots import take_slots
from tests.unit.compute.token_masks import GRAMMAR_SPEC, bits_of

PLAIN = SamplingParams(max_tokens=100, seed=1)
GREEDY = replace(PLAIN, temperature=0.0)
VOCAB_SIZE = 1003


def sampler_of(step: SamplingStep, device: torch.device, vocab_size: int) -> DeviceSampler:
    sampler = DeviceSampler(vocab_size, step.resident, step.inputs)
    place(sampler, step.deltas, device)
    return sampler


def flags_of(deltas: Sequence[SlotDelta]) -> SlotFlags:
    flags = SlotFlags(NUM_SLOTS)
    flags.take(slots_of(deltas, VOCAB_SIZE)[0])
    return flags


def variant_of(flags: SlotFlags, *slots: int, index: int = 0) -> Variant:
    return flags.variant(int32_array(slots), int32_array([index] * len(slots)))[0]


@pytest.mark.parametrize(("seed", "vocab_size"), [(0, 1003), (1, 5003), (2, 777)])
def test_tokens_counts_and_logprobs_are_the_cpus(
    seed: int, vocab_size: int, device: torch.device
) -> None:
    step = make_step(random_settings(14, seed), vocab_size, device)
    ours = sampler_of(step, device, vocab_size)
    theirs = Sampler(NUM_SLOTS, vocab_size)
    take_slots(theirs, step.deltas, vocab_size)
    for turn in range(2):
        slots = [(slot * 5 + turn) % 14 for slot in range(14)][turn:]
        indices = [(slot + turn) % 5 for slot in slots]
        step.choose(slots, indices)
        logits = random_logits(len(slots), vocab_size, seed * 10 + turn, device)
        before = logits.clone()
        result = ours.launch(Variant.FULL, logits, len(slots)).cpu().numpy()
        assert torch.equal(logits, before)
        tokens, finite, scores = ours.unpack(result)
        sampled = theirs.sample(logits.cpu(), as_int64(slots), as_int64(indices))
        assert tokens.tolist() == sampled.tokens_S.tolist()
        assert finite.all()
        assert step.resident.last_token[slots].tolist() == tokens.tolist()
        expected = sampled.logprobs
        assert scores.keys() == expected.keys()
        for sample, (score,) in scores.items():
            (wanted,) = expected[sample]
            assert score.chosen == pytest.approx(wanted.chosen, abs=1e-5)
            assert score.top_ids == wanted.top_ids
            assert score.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-5)


def test_structured_rows_draw_what_the_cpu_draws_under_the_same_masks(device: torch.device) -> None:
    """Also in the step after, when what skipped samples drew counts on neither side."""
    settings = [
        replace(sampling, grammar_spec=GRAMMAR_SPEC) if number % 3 else sampling
        for number, sampling in enumerate(random_settings(14, 11))
    ]
    step = make_step(settings, VOCAB_SIZE, device)
    ours = sampler_of(step, device, VOCAB_SIZE)
    theirs = Sampler(NUM_SLOTS, VOCAB_SIZE)
    take_slots(theirs, step.deltas, VOCAB_SIZE)
    assert variant_of(flags_of(step.deltas), 1) >= Variant.ADJUSTED
    packed = np.full(len(ours.masks.packed), 10**9, dtype=np.int32)  # rows that nobody looks at
    for turn in range(3):
        logits = random_logits(14, VOCAB_SIZE, 20 + turn, device)
        masks = random_masks([n for n in range(14) if n % 3], (4, 7 + turn), turn)
        pack_masks(masks, NUM_SLOTS, mask_words(VOCAB_SIZE), packed)
        packed[0:14:3] = 10**9  # samples without guidance do not look at one
        ours.masks.packed.copy_(torch.from_numpy(packed))
        step.choose(range(14), [turn] * 14)
        result = ours.launch(Variant.FULL, logits, 14)
        indices = as_int64([turn] * 14)
        sampled = theirs.sample(logits.clone().cpu(), as_int64(range(14)), indices, masks)
        drawn = [n for n in range(14) if n not in masks.skipped]
        assert result[drawn, 0].tolist() == sampled.tokens_S[drawn].tolist()
        assert result[:, 1].tolist() == [1] * 14
        assert step.resident.last_token[drawn].tolist() == result[drawn, 0].tolist()


def random_masks(structured: list[int], skipped: tuple[int, ...], seed: int) -> TokenMasks:
    """Some allow one token, some a few, some nearly all; none only ids that end a text."""
    draw = np.random.default_rng(seed)
    samples = [sample for sample in structured if sample not in skipped]
    rows = []
    for sample in samples:
        ids = draw.permutation(VOCAB_SIZE)[: (1, 2, 30, 900)[sample % 4]]
        rows.append(bits_of([*ids.tolist(), 100], VOCAB_SIZE))
    bits = np.array(rows, dtype=np.int32)
    return TokenMasks(
        np.array(samples, dtype=np.int32), bits, tuple(s for s in skipped if s in structured)
    )


def test_a_void_draw_is_not_said_and_no_next_input(device: torch.device) -> None:
    settings = [replace(GREEDY, presence_penalty=1.0, grammar_spec=GRAMMAR_SPEC)] * 2
    step = make_step(settings, VOCAB_SIZE, device)
    sampler = sampler_of(step, device, VOCAB_SIZE)
    sampler.masks.row_of_S[0], sampler.masks.row_of_S[1] = VOID_MASK, 0
    sampler.masks.bits_GM[0] = 0
    sampler.masks.bits_GM[0, 0] = 1
    step.resident.last_token.fill_(-7)
    step.resident.length[:2], step.resident.output_index[:2] = 40, 5
    said = sampler._shaped.said_NV.clone()
    result = sampler.launch(Variant.FULL, random_logits(2, VOCAB_SIZE, 3, device), 2)
    assert step.resident.last_token[:2].tolist() == [-7, 0]
    assert step.resident.length[:2].tolist() == [40, 41]
    assert step.resident.output_index[:2].tolist() == [5, 6]
    assert 0 <= int(result[0, 0]) < VOCAB_SIZE
    said[1, 0] += 1
    assert torch.equal(sampler._shaped.said_NV, said)


def test_a_row_is_the_same_alone_and_in_company_and_in_any_variant_that_serves_it(
    device: torch.device,
) -> None:
    settings = [GREEDY, PLAIN, replace(PLAIN, temperature=0.3, seed=9), *random_settings(9, 5)]
    step = make_step(settings, 2500, device)
    logits = random_logits(12, 2500, 6, device)
    indices = [slot % 4 for slot in range(12)]
    step.choose(range(12), indices)
    together = sampler_of(step, device, 2500).launch(Variant.FULL, logits, 12).clone()
    for slot in range(12):
        step.choose([slot], [indices[slot]])
        needed = variant_of(flags_of(step.deltas), slot, index=indices[slot])
        assert (slot >= 3) or needed is Variant.PLAIN
        row = logits[slot : slot + 1]
        for variant in (needed, Variant.FULL):
            alone = sampler_of(step, device, 2500).launch(variant, row, 1)[0]
            asked = settings[slot].num_logprobs
            words = [0, 1]
            if variant is Variant.FULL and asked >= 0:
                words += [CHOSEN, *(TOP_IDS + rank for rank in range(asked))]
                words += [TOP_LOGPROBS + rank for rank in range(asked)]
            assert alone[words].tolist() == together[slot, words].tolist()


def test_a_row_past_its_min_tokens_is_no_longer_adjusted(device: torch.device) -> None:
    settings = [replace(PLAIN, min_tokens=4, top_p=0.9), replace(PLAIN, min_tokens=4)]
    step = make_step(settings, VOCAB_SIZE, device)
    sampler = sampler_of(step, device, VOCAB_SIZE)
    sampler._shaped.adjusted_SV.fill_(torch.nan)
    theirs = Sampler(NUM_SLOTS, VOCAB_SIZE)
    take_slots(theirs, step.deltas, VOCAB_SIZE)
    logits = random_logits(2, VOCAB_SIZE, 9, device)
    for variant, index in ((Variant.ADJUSTED, 3), (Variant.FULL, 4), (Variant.CUTS, 4)):
        step.choose([0, 1], [index] * 2)
        result = sampler.launch(variant, logits, 2)
        sampled = theirs.sample(logits.clone().cpu(), as_int64([0, 1]), as_int64([index] * 2))
        assert result[:, 0].tolist() == sampled.tokens_S.tolist()
        sampler._shaped.adjusted_SV.fill_(torch.nan)


def test_what_is_drawn_counts_for_the_next_step(device: torch.device) -> None:
    step = make_step([replace(GREEDY, frequency_penalty=0.6)], VOCAB_SIZE, device)
    sampler = sampler_of(step, device, VOCAB_SIZE)
    step.choose([0], [3])
    logits = torch.zeros(1, VOCAB_SIZE, device=device)
    logits[0, 10], logits[0, 20] = 1.0, 0.5
    drawn = [int(sampler.launch(Variant.ADJUSTED, logits, 1)[0, 0]) for _ in range(5)]
    assert drawn == [10, 20, 10, 0, 1]


def test_a_result_is_read_by_what_its_own_step_asked(device: torch.device) -> None:
    step = make_step([GREEDY, replace(GREEDY, num_logprobs=3)], VOCAB_SIZE, device)
    sampler = sampler_of(step, device, VOCAB_SIZE)
    logits = random_logits(2, VOCAB_SIZE, 8, device)
    result = sampler.launch(Variant.FULL, logits, 2).cpu().numpy()
    _, _, scores = sampler.unpack(result)
    assert list(scores) == [1] and len(scores[1][0].top_ids) == 3


def test_a_slot_forgets_who_had_it(device: torch.device) -> None:
    first = replace(GREEDY, repetition_penalty=2.0, logit_bias=((9, 7.0),), min_tokens=50)
    step = make_step([first], VOCAB_SIZE, device)
    sampler = sampler_of(step, device, VOCAB_SIZE)
    assert sampler._shaped.said_NV[0, [1, 4, 5]].tolist() == [SEEN_IN_PROMPT, 1, 2]
    eight = int32_array((8,))
    place(sampler, [SlotDelta(0, 1, first, 0, (), eight)], device)
    assert sampler._shaped.said_NV[0, [1, 4, 5, 8]].tolist() == [0, 0, 0, SEEN_IN_PROMPT]
    assert variant_of(flags_of([*step.deltas, SlotDelta(0, 2, GREEDY, 0, ())]), 0) is Variant.PLAIN


def test_a_step_takes_the_smallest_variant_that_serves_all_its_samples(
    device: torch.device,
) -> None:
    settings = [
        GREEDY,
        PLAIN,
        replace(PLAIN, top_p=0.9),
        replace(GREEDY, top_p=0.9),
        replace(PLAIN, presence_penalty=1.0),
        replace(PLAIN, num_logprobs=0),
        replace(PLAIN, min_tokens=4),
    ]
    variant = partial(variant_of, flags_of(make_step(settings, VOCAB_SIZE, device).deltas))
    assert variant(0, 1, 3) is Variant.PLAIN
    assert variant(0, 2) is Variant.CUTS
    assert variant(2, 4) is Variant.ADJUSTED
    assert variant(4, 5) is Variant.FULL
    assert variant(5) is Variant.FULL
    assert variant(6, index=3) is Variant.ADJUSTED
    assert variant(6, index=4) is Variant.PLAIN
    assert variant(6) is Variant.ADJUSTED


def test_more_bias_than_there_is_room_for_is_refused() -> None:
    bias = tuple((token, 1.0) for token in range(MAX_BIAS + 1))
    with pytest.raises(ValueError, match="1025 logit_bias pairs"):
        slots_of([SlotDelta(0, 0, replace(GREEDY, logit_bias=bias), 0, ())], 2 * MAX_BIAS)
