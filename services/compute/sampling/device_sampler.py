"""Sampling of a step on the GPU: settings, counts and results in place, work as captured launches.

The same draws as `Sampler`'s, but for how the last bits of a score are rounded: its order of
operations, its noise, its exact cuts.

Shape legend: S samples, V vocabulary, N slots, W words of a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.compute.kernels.draw.kernel import draw
from services.compute.kernels.draw.parts import Parts
from services.compute.kernels.slot_words import FLAGS
from services.compute.kernels.step_input.buffers import Resident, StepInputs
from services.compute.sampling.slot_words import slot_words
from services.compute.step import Int32Array, SlotDelta, StepPlan, TokenLogprobs

BoolArray = npt.NDArray[np.bool_]


class Variant(Enum):
    """Which launches a step's sampling needs; each is captured by itself."""

    PLAIN = "plain"  # greedy or temperature only
    FULL = "full"


class DeviceSampler:
    """Draws the next tokens of a step from logits that lie on the device."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        max_samples: int,
        resident: Resident,
        inputs: StepInputs,
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._resident = resident
        self._inputs = inputs
        self._flags = np.zeros(num_slots, dtype=np.int32)
        self._parts = Parts.make(max_samples, vocab_size, device)
        self._plain_SW = torch.zeros((max_samples, 2), dtype=torch.int32, device=device)

    def place(self, deltas: Sequence[SlotDelta]) -> None:
        """Sequences take slots; whatever was known of the slots before is gone."""
        for delta in deltas:
            self._flags[delta.slot] = slot_words(delta, self._vocab_size)[FLAGS]

    def variant(self, slots: npt.NDArray[np.int_]) -> Variant:
        """What the samples of these slots need."""
        return Variant.FULL if self._flags[slots].any() else Variant.PLAIN

    def launch(self, variant: Variant, logits_SV: Tensor, num_samples_bucket: int) -> Tensor:
        """Queue the draws of the samples in `StepInputs`; returns their results [S, W].

        Allocates nothing and waits for nothing, so that it can be captured.
        """
        inputs, resident = self._inputs, self._resident
        result_SW = self._plain_SW[:num_samples_bucket]
        draw(
            logits_SV[:num_samples_bucket],
            inputs.sample_slot_S,
            inputs.sample_index_S,
            inputs.counts,
            resident.slot_params,
            self._parts,
            resident.last_token,
            result_SW,
        )
        return result_SW

    def unpack(
        self, result_SW: Int32Array, plan: StepPlan
    ) -> tuple[Int32Array, BoolArray, dict[int, tuple[TokenLogprobs, ...]]]:
        """Tokens [S], which of them came of finite logits, and logprobs by sample."""
        count = len(plan.sample_row)
        return result_SW[:count, 0].copy(), result_SW[:count, 1] != 0, {}
