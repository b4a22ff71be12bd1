"""Drafts from the text itself: the launch behind the draws looks them up as it accepts others."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from services.compute.kernels.drafts.draft_tokens import SlotTexts, draft_tokens, remember_tokens
from services.compute.kernels.step.slot_words import SampleRows
from services.compute.kv.transfer import Direction
from services.compute.runner.cuda.drafter import Launch, MachineParts
from services.compute.sampling.device_sampler import DeviceSampler
from services.compute.step import Int32Array


class TextDrafter:
    """Has the drafts of the next step before that begins, and computes none."""

    def __init__(self, machine: MachineParts) -> None:
        self._inputs, self._resident, self._rule = machine.inputs, machine.resident, machine.rule
        sizes, device = machine.sizes, machine.packed.device
        self._texts = SlotTexts.make(sizes.max_rows, sizes.max_positions, device)

    def attach(self, num_pages: int, num_host_pages: int) -> None:
        pass

    def sides(self, direction: Direction) -> tuple[Tensor, Tensor] | None:
        return None

    def enter(self, packed: Tensor) -> None:
        remember_tokens(packed, self._texts)

    def see(self, num_tokens: int, has_chunks: bool) -> None:
        pass

    def follow(self, rows: SampleRows, said_NV: Tensor, result_SW: Tensor) -> None:
        about = rows, self._inputs, self._resident, self._texts
        draft_tokens(*about, said_NV, self._rule, result_SW)

    def launches(self, sampler: DeviceSampler) -> Iterator[Launch]:
        yield from ()

    def ask(self, num_tokens: int) -> None:
        pass

    def draft(self, ints: Int32Array, header: list[int]) -> None:
        pass
