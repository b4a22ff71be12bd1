"""Draft rows on the device: as on the CPU, step after step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.speculative import SpeculativeSettings
from services.compute.kernels.drafts.draft_tokens import (
    DraftRule,
    SlotTexts,
    draft_tokens,
    remember_tokens,
    said_drafts,
    unpack_drafts,
)
from services.compute.kernels.sampling.slot_entries import SlotEntry, pack_entries
from services.compute.kernels.step.slot_words import DRAFTS, FLAGS, NUM_WORDS, PENALISED, SampleRows
from services.compute.kernels.step.step_buffers import NUM_TOKENS, Resident, StepInputs
from services.compute.kernels.step.step_deltas import apply_deltas, apply_deltas_reference
from services.compute.kernels.step.step_input import unpack_step, unpack_step_reference
from services.compute.runner.eager_drafting import EagerDrafting
from services.compute.runner.slot_states import Rows, SlotStates
from services.compute.runner.uploads import NO_SLOT_ROWS, StepPacker, StepUpload
from services.compute.speculative.ngram import NgramDrafter
from services.compute.step import (
    DEVICE_TOKEN,
    NO_DRAFTS,
    NO_IDS,
    BoolArray,
    Int32Array,
    StepPlan,
    int32_array,
)

NUM_SLOTS, NUM_DRAFTS, PAGE_TOKENS, MAX_POSITIONS = 5, 3, 8, 200
PROMPT_LENS = (1, 9, 30, 2, 17)
NOT_DRAFTING, PENALISED_SLOT = 3, 1
PREDICTION_LENS = (0, 25, 170, 0, 1)  # one for which there is just room
MAX_ROWS = NUM_SLOTS * (1 + NUM_DRAFTS)


def prompts_plan(prompts: list[Int32Array]) -> StepPlan:
    """A chunk for each slot, all of its prompt."""
    lengths = int32_array([len(prompt) for prompt in prompts])
    slots = np.arange(len(prompts), dtype=np.int32)
    zeros = np.zeros_like(slots)
    return StepPlan(
        step_id=0,
        num_decode_rows=0,
        row_slot=slots,
        row_epoch=zeros,
        q_start=zeros,
        q_len=lengths,
        pos_upper=lengths,
        tokens=np.concatenate(prompts),
        sample_row=slots,
        sample_index=zeros,
        page_slot=NO_IDS,
        page_index=NO_IDS,
        page_id=NO_IDS,
    )


def decodes_plan(step_id: int, num_drafts: Int32Array, given_QK: Int32Array) -> StepPlan:
    """A decode row for each slot."""
    slots = np.arange(len(num_drafts), dtype=np.int32)
    return replace(
        prompts_plan([int32_array((DEVICE_TOKEN,))] * len(num_drafts)),
        step_id=step_id,
        num_decode_rows=len(num_drafts),
        row_slot=slots,
        num_drafts=num_drafts if num_drafts.any() else NO_IDS,
        given_drafts=given_QK if num_drafts.any() else NO_DRAFTS,
    )


class BothSides:
    """The same slots on the device and, as reference, on the CPU."""

    def __init__(self, rate: float, device: torch.device, rng: np.random.Generator) -> None:
        self.rng, self.num_predicted = rng, 0  # times that drafts were from the prediction
        settings = SpeculativeSettings(
            num_speculative_tokens=NUM_DRAFTS, prompt_lookup_max=4, synthetic_acceptance_rate=rate
        )
        lookups = settings.prompt_lookup_min, settings.prompt_lookup_max
        self.rule = DraftRule(NUM_DRAFTS, *lookups, rate, says=True)
        self.drafting = EagerDrafting(settings, NgramDrafter(NUM_SLOTS, MAX_POSITIONS, settings))
        self.states = SlotStates(NUM_SLOTS, NUM_DRAFTS)
        self.resident = Resident.make(NUM_SLOTS, 40, NUM_WORDS, device, num_drafts=NUM_DRAFTS)
        self.resident.slot_params[:, FLAGS] = DRAFTS
        self.resident.slot_params[NOT_DRAFTING, FLAGS] = 0
        self.resident.slot_params[PENALISED_SLOT, FLAGS] |= PENALISED
        self.said = np.zeros((NUM_SLOTS, 4), dtype=np.int32)
        self.said_NV = torch.from_numpy(self.said.copy()).to(device)
        self.inputs = StepInputs.make(128, MAX_ROWS, device)
        self.texts = SlotTexts.make(NUM_SLOTS, MAX_POSITIONS, device)
        self.device, self.packer = device, StepPacker(NUM_SLOTS)
        self.upload = np.zeros(4096, dtype=np.int32)

    def some(self, length: int) -> Int32Array:
        """Ids by chance, of few, so that they are soon found again."""
        return self.rng.integers(1, 4, length).astype(np.int32)

    def enter(self, prompts: list[Int32Array]) -> None:
        """Sequences take all slots."""
        entries = [
            SlotEntry(slot, False, prompt, *[NO_IDS] * 4, slot != NOT_DRAFTING, self.some(length))
            for slot, (prompt, length) in enumerate(zip(prompts, PREDICTION_LENS, strict=True))
        ]
        num_ints = pack_entries(entries, self.upload)
        self.drafting.enter(self.upload[:num_ints])
        remember_tokens(torch.from_numpy(self.upload.copy()).to(self.device), self.texts)

    def unpack(self, plan: StepPlan) -> Rows:
        """Unpack a step on both sides; returns its rows."""
        step = StepUpload.read(self.upload[: self.packer.pack(plan, NO_SLOT_ROWS, self.upload)])
        packed, inputs, resident = torch.from_numpy(self.upload.copy()), self.inputs, self.resident
        changed = Resident(*(tensor.clone().cpu() for tensor in resident))
        apply_deltas_reference(packed, changed)
        apply_deltas(packed.to(self.device), resident)
        for ours, theirs in zip(resident, changed, strict=True):
            assert torch.equal(ours.cpu(), theirs)
        expected = StepInputs(*(tensor.clone().cpu() for tensor in inputs))
        before = Resident(*(tensor.clone().cpu() for tensor in resident))
        num_tokens = step.header[NUM_TOKENS]
        unpack_step_reference(packed, before, expected, num_tokens, PAGE_TOKENS)
        unpack_step(packed.to(self.device), resident, inputs, num_tokens, PAGE_TOKENS)
        for name in expected._fields:
            assert torch.equal(getattr(inputs, name).cpu(), getattr(expected, name)), name
        rows = self.states.unpack(step)
        assert inputs.sample_slot_S[: len(rows.slot_S)].tolist() == rows.slot_S.tolist()
        assert inputs.sample_index_S[: len(rows.slot_S)].tolist() == rows.index_S.tolist()
        assert inputs.tokens_T[:num_tokens].tolist() == rows.tokens_T.tolist()
        assert inputs.q_start_R[: len(rows.slots_R)].tolist() == rows.q_start_R.tolist()
        return rows

    def draw(self, rows: Rows, draws: BoolArray) -> int:
        """Draw by chance and accept and draft on both sides; returns how many drafts were right."""
        count = len(rows.slot_S)
        drawn, inputs = self.rng.integers(1, 4, count), self.inputs
        shape = MAX_ROWS, 2 + self.rule.result_words
        result = torch.zeros(shape, dtype=torch.int32, device=self.device)
        result[:count, 0] = torch.from_numpy(drawn)
        result[:count, -2] = torch.from_numpy(draws)
        words = inputs.counts, self.resident.slot_params
        samples = SampleRows(inputs.sample_slot_S, inputs.sample_index_S, *words)
        draft_tokens(samples, inputs, self.resident, self.texts, self.said_NV, self.rule, result)
        counts = self.drafting.accepted(rows, drawn) & draws
        counted = counts & (rows.slot_S == PENALISED_SLOT)
        np.add.at(self.said, (rows.slot_S[counted], drawn[counted]), 1)
        assert self.said_NV.tolist() == self.said.tolist()
        self.states.advance(rows.slot_S[counts], drawn[counts])
        found = self.drafting.draft(self.states, rows.slot_S, drawn, counts)
        expected = counts, rows.num_offered_S, found.num_S, found.by_S
        self.num_predicted += int(found.by_S.sum())
        on_host = result[:count].cpu().numpy()
        assert [c.tolist() for c in unpack_drafts(on_host)] == [c.tolist() for c in expected]
        firsts = rows.number_S == 0
        said = self.states.drafts_NK[rows.slot_S[firsts], :-1]
        assert said_drafts(on_host, NUM_DRAFTS)[firsts].tolist() == said.tolist()
        return int(counts[rows.number_S > 0].sum())

    def check_alike(self) -> None:
        """Slots are the same on both sides."""
        states, resident = self.states, self.resident
        assert resident.length.tolist() == states._length.tolist()
        assert resident.output_index.tolist() == states._output_index.tolist()
        assert resident.last_token.tolist() == states._last_token.tolist()
        assert resident.drafts_NK.tolist() == states.drafts_NK.tolist()


@pytest.mark.parametrize("rate", [-1.0, 0.6])
def test_rows_drafts_and_what_is_accepted_are_those_of_the_cpu(
    rate: float, device: torch.device
) -> None:
    rng = np.random.default_rng(7)
    sides = BothSides(rate, device, rng)
    prompts = [sides.some(length) for length in PROMPT_LENS]
    sides.enter(prompts)
    plan, num_right = prompts_plan(prompts), 0
    for step_id in range(1, 20):
        rows = sides.unpack(plan)
        is_masked = (rows.slot_S == NOT_DRAFTING) & (step_id % 4 == 0)  # its mask is not there
        num_right += sides.draw(rows, ~is_masked)
        sides.check_alike()
        num_drafts = rng.integers(0, NUM_DRAFTS + 1, NUM_SLOTS).astype(np.int32)
        given_QK = np.full((NUM_SLOTS, NUM_DRAFTS), DEVICE_TOKEN, dtype=np.int32)
        if step_id % 3:
            given_QK[NOT_DRAFTING] = rng.integers(1, 4, NUM_DRAFTS)
            given_QK[0, 0] = 2
        else:
            num_drafts[NOT_DRAFTING] = 0
        plan = decodes_plan(step_id, num_drafts * (step_id % 5 > 0), given_QK)
    assert num_right > 10
    assert sides.num_predicted > 10 or rate >= 0.0
