"""A step's samples, laid out as the kernels of sampling read them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.messages.sampling import SamplingParams
from services.compute.kernels.sampling.slot_entries import pack_entries, packed_size
from services.compute.kernels.step.slot_words import NUM_WORDS, SampleRows
from services.compute.kernels.step.step_buffers import NUM_SAMPLES, Resident, StepInputs
from services.compute.sampling.device_sampler import DeviceSampler
from services.compute.sampling.slots import slot_words, slots_of
from services.compute.step import SlotDelta, int32_array

NUM_SLOTS = 24
STOP_IDS = (6, 7)
PROMPT_IDS = int32_array((1, 2, 3))
OUTPUT_IDS = int32_array((4, 5, 5))


@dataclass(frozen=True, slots=True)
class SamplingStep:
    """Slots with settings, and which of them are sampled."""

    resident: Resident
    inputs: StepInputs
    deltas: tuple[SlotDelta, ...]  # by slot

    def choose(self, slots: Sequence[int], indices: Sequence[int]) -> None:
        """These slots are sampled, for these output numbers; all other rows are padding."""
        self.inputs.counts[NUM_SAMPLES] = len(slots)
        self.inputs.sample_slot_S.fill_(-1)
        self.inputs.sample_slot_S[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        self.inputs.sample_index_S[: len(slots)] = torch.tensor(indices, dtype=torch.int32)

    @property
    def rows(self) -> SampleRows:
        """Sampled slots, output indices, counts and the slots' words."""
        inputs = self.inputs
        return SampleRows(
            inputs.sample_slot_S, inputs.sample_index_S, inputs.counts, self.resident.slot_params
        )


def make_step(
    settings: Sequence[SamplingParams],
    vocab_size: int,
    device: torch.device,
    stop_ids: tuple[int, ...] = STOP_IDS,
) -> SamplingStep:
    """Slot i has settings[i], and all slots have the same history; slot i is sample i."""
    resident = Resident.make(NUM_SLOTS, 4, NUM_WORDS, device)
    inputs = StepInputs.make(64, NUM_SLOTS, device)
    deltas = tuple(
        SlotDelta(slot, 0, sampling, slot % 3, stop_ids, PROMPT_IDS, OUTPUT_IDS)
        for slot, sampling in enumerate(settings)
    )
    for delta in deltas:
        words = torch.from_numpy(slot_words(delta, vocab_size))
        resident.slot_params[delta.slot] = words.to(device)
    step = SamplingStep(resident, inputs, deltas)
    step.choose(range(len(deltas)), range(len(deltas)))
    return step


def place(sampler: DeviceSampler, deltas: Sequence[SlotDelta], device: torch.device) -> None:
    """Let sequences bring to their slots what words do not hold."""
    _, entries = slots_of(deltas, sampler._vocab_size)
    out = np.full(packed_size(0), 10**9, dtype=np.int32)
    pack_entries(entries, out)
    sampler.enter(torch.from_numpy(out).to(device))


def random_logits(
    rows: int, vocab_size: int, seed: int, device: torch.device, spread: float = 3.0
) -> torch.Tensor:
    """Float32 [rows, V]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * spread).to(device)


def random_settings(count: int, seed: int) -> list[SamplingParams]:
    """Settings of all kinds, mixed."""
    pick = random.Random(seed).choice
    return [
        SamplingParams(
            max_tokens=100,
            seed=pick([1, 2**40 + 3, 2**64 - 1, -5]) * (number + 1),
            temperature=pick([0.0, 1e-6, 0.3, 1.0, 2.0]),
            top_k=pick([0, 0, 1, 5, 700]),
            top_p=pick([0.05, 0.7, 0.95, 1.0, 1.0]),
            min_p=pick([0.0, 0.0, 0.02, 0.5]),
            presence_penalty=pick([0.0, 0.0, 1.5]),
            frequency_penalty=pick([0.0, 0.0, -0.7]),
            repetition_penalty=pick([1.0, 1.0, 1.3]),
            logit_bias=pick([(), ((3, 5.0), (4, -5.0), (3, 1.0), (10**6, 4.0))]),
            min_tokens=pick([0, 3]),
            num_logprobs=pick([-1, -1, 0, 4, 20]),
        )
        for number in range(count)
    ]


def as_int64(values: Sequence[int]) -> np.ndarray:
    """As the CPU's sampler takes slots and indices."""
    return np.array(values, dtype=np.int64)
