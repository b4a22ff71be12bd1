"""Penalties, bias and early stops."""

from __future__ import annotations

from dataclasses import replace

import torch

from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.kernels.sampling.logits_processors import (
    SEEN_IN_PROMPT,
    DraftedRows,
    ProcessorTables,
    process_logits,
    process_logits_reference,
)
from services.compute.kernels.step.slot_words import (
    FIRST_FORCED,
    VOID_MASK,
    MaskRows,
    ProcessedLogits,
)
from services.compute.sampling.slots import known_bias
from services.compute.step import MAX_BIAS, MAX_STOP_IDS
from services.router.openai.sampling import MAX_STOP_TOKEN_IDS
from tests.kernels.sampling_step import (
    NUM_SLOTS,
    STOP_IDS,
    SamplingStep,
    make_step,
    random_logits,
)

PLAIN = SamplingParams(max_tokens=100, seed=1)
STRUCTURED = replace(PLAIN, grammar_spec=GrammarSpec(grammar="start: /a/"))
MANY_PAIRS = tuple((token * 5, (token % 40) - 20.0) for token in range(MAX_BIAS))
VOCAB_SIZE = 5003


def tables_of(step: SamplingStep, device: torch.device) -> ProcessorTables:
    """Poisoned beyond what the slots have."""
    tables = ProcessorTables.make(NUM_SLOTS, device)
    tables.bias_id_NB.fill_(10**9)
    tables.bias_NB.fill_(torch.nan)
    tables.stop_id_NE.fill_(10**9)
    for delta in step.deltas:
        bias = known_bias(delta.sampling, VOCAB_SIZE)
        tables.bias_id_NB[delta.slot, : len(bias)] = torch.tensor(list(bias), dtype=torch.int32)
        tables.bias_NB[delta.slot, : len(bias)] = torch.tensor(list(bias.values()))
        stops = torch.tensor(delta.stop_ids, dtype=torch.int32)
        tables.stop_id_NE[delta.slot, : len(stops)] = stops
    return tables


def shaped_of(adjusted: torch.Tensor, said: torch.Tensor) -> ProcessedLogits:
    """Without cuts."""
    nothing = torch.empty(0, device=said.device)
    return ProcessedLogits(adjusted, nothing.int(), nothing, said)


def poisoned_masks(device: torch.device) -> MaskRows:
    """Every sample's row is far away."""
    masks = MaskRows.make(NUM_SLOTS, VOCAB_SIZE, device)
    masks.row_of_S.fill_(10**9)
    masks.bits_GM.random_(-(2**31), 2**31 - 1, generator=torch.Generator(device).manual_seed(3))
    return masks


def test_rows_are_adjusted_as_the_reference_does_and_others_left_alone(
    device: torch.device,
) -> None:
    settings = [
        PLAIN,
        replace(PLAIN, presence_penalty=1.5),
        replace(PLAIN, frequency_penalty=-0.7, repetition_penalty=1.3),
        replace(PLAIN, logit_bias=MANY_PAIRS),
        replace(PLAIN, min_tokens=5, temperature=0.0),
        replace(PLAIN, min_tokens=5),
        replace(PLAIN, min_tokens=9, logit_bias=((6, 50.0), (2, -1.0)), repetition_penalty=0.5),
        replace(PLAIN, top_k=5, num_logprobs=3),
    ]
    step = make_step(settings, VOCAB_SIZE, device)
    step.choose(range(8), [9, 9, 9, 9, 4, 5, 8, 0])
    logits = random_logits(8, VOCAB_SIZE, seed=1, device=device)
    generator = torch.Generator().manual_seed(2)
    said = torch.randint(0, 4, (NUM_SLOTS, VOCAB_SIZE), generator=generator, dtype=torch.int32)
    said |= SEEN_IN_PROMPT * torch.randint(0, 2, said.shape, generator=generator).int()
    said = said.to(device)
    tables, masks = tables_of(step, device), poisoned_masks(device)
    outputs = []
    draft = torch.randint(0, VOCAB_SIZE, (NUM_SLOTS, 3), generator=generator, dtype=torch.int32)
    draft[:, 1] = draft[:, 0]
    number = torch.tensor([0, 1, 2, 0, 0, 0, 0, 0], dtype=torch.int32)
    drafted = DraftedRows(number.to(device), draft.to(device))
    for run, dtype in ((process_logits, torch.float32), (process_logits_reference, torch.float64)):
        adjusted = torch.full((8, VOCAB_SIZE), torch.nan, dtype=dtype, device=device)
        run(logits.to(dtype), step.rows, tables, masks, shaped_of(adjusted, said), drafted)
        outputs.append(adjusted.double())
    ours, reference = outputs
    assert ours[[0, 5, 7]].isnan().all()  # the sixth is past its min_tokens
    assert ours[4, list(STOP_IDS)].isneginf().all()
    assert torch.equal(ours.isneginf(), reference.isneginf())
    kept = reference.isfinite()
    error = (ours - reference)[kept].norm() / reference[kept].norm()
    assert float(error) < 1e-6


def test_as_many_stop_ids_as_there_is_room_for_are_held_back(device: torch.device) -> None:
    stops = tuple(range(3, 3 + 4 * MAX_STOP_IDS, 4))
    assert len(stops) == MAX_STOP_IDS >= 2 * MAX_STOP_TOKEN_IDS  # routers' and the model's own
    step = make_step([replace(PLAIN, min_tokens=5)], VOCAB_SIZE, device, stops)
    logits = random_logits(1, VOCAB_SIZE, seed=1, device=device)
    said = torch.zeros((NUM_SLOTS, VOCAB_SIZE), dtype=torch.int32, device=device)
    adjusted = torch.full((1, VOCAB_SIZE), torch.nan, device=device)
    tables, masks = tables_of(step, device), poisoned_masks(device)
    process_logits(logits, step.rows, tables, masks, shaped_of(adjusted, said))
    assert torch.nonzero(adjusted[0].isneginf()).flatten().tolist() == list(stops)


def test_structured_rows_keep_what_their_mask_allows_and_no_other_row_looks_at_one(
    device: torch.device,
) -> None:
    settings = [
        STRUCTURED,
        PLAIN,
        replace(STRUCTURED, logit_bias=MANY_PAIRS, presence_penalty=1.0, repetition_penalty=1.2),
        replace(STRUCTURED, min_tokens=5, temperature=0.0),
        replace(PLAIN, frequency_penalty=0.5),
        STRUCTURED,
        STRUCTURED,
        STRUCTURED,
    ]
    step = make_step(settings, VOCAB_SIZE, device)
    logits = random_logits(8, VOCAB_SIZE, seed=4, device=device)
    said = torch.arange(NUM_SLOTS * VOCAB_SIZE, dtype=torch.int32, device=device) % 3
    said = said.view(NUM_SLOTS, VOCAB_SIZE)
    tables, masks = tables_of(step, device), poisoned_masks(device)
    for sample, row in ((0, 3), (2, 0), (3, 1), (5, VOID_MASK), (6, 2), (7, FIRST_FORCED - 4999)):
        masks.row_of_S[sample] = row
    masks.bits_GM[2] = 0
    masks.bits_GM[2, -1] = 1 << (VOCAB_SIZE - 1) % 32  # the last id alone
    outputs = []
    for run, dtype in ((process_logits, torch.float32), (process_logits_reference, torch.float64)):
        adjusted = torch.full((8, VOCAB_SIZE), torch.nan, dtype=dtype, device=device)
        run(logits.to(dtype), step.rows, tables, masks, shaped_of(adjusted, said))
        outputs.append(adjusted.double())
    ours, reference = outputs
    assert ours[1].isnan().all()
    assert torch.equal(ours.isneginf(), reference.isneginf())
    assert not ours[[4, 5]].isinf().any()
    assert ours[6].isfinite().nonzero().tolist() == [[VOCAB_SIZE - 1]]
    assert ours[7].isfinite().nonzero().tolist() == [[4999]]
    assert 0.4 < float(ours[[0, 2, 3]].isneginf().double().mean()) < 0.6
    kept = reference.isfinite()
    error = (ours - reference)[kept].norm() / reference[kept].norm()
    assert float(error) < 1e-6
