"""What a drafter that computes guesses, on the CUDA runner and on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from services.compute.runner.packing_runner import PackingRunner
from services.compute.speculative.drafter import DecodeRows
from services.compute.step import Int64Array


class Guesses(dict[tuple[int, int, int], int]):
    """Drafts by their slot, the number of the output token that they follow, and their own."""

    def of_device(self, runner: PackingRunner, patch: pytest.MonkeyPatch) -> None:
        machine = runner.executor._machine  # type: ignore[attr-defined]
        forward, resident = machine.forward, machine.resident

        def kept(num_tokens: int, only_decodes: bool) -> None:
            columns = resident.output_index.tolist(), resident.drafts_NK.tolist()
            for slot, (index, drafts) in enumerate(zip(*columns, strict=True)):
                self._keep(slot, index, drafts)
            forward(num_tokens, only_decodes)

        patch.setattr(machine, "forward", kept)

    def of_cpu(self, drafter_class: type[Any], patch: pytest.MonkeyPatch) -> None:
        draft = drafter_class.draft

        def kept(drafter: Any, decodes: DecodeRows, drafts_NK: Int64Array) -> Iterable[bool]:
            yield from draft(drafter, decodes, drafts_NK)
            for slot, index in zip(decodes.slots_Q, decodes.indices_Q, strict=True):
                self._keep(int(slot), int(index), drafts_NK[slot].tolist())

        patch.setattr(drafter_class, "draft", kept)

    def _keep(self, slot: int, index: int, drafts: list[int]) -> None:
        self.update({(slot, index, k): draft for k, draft in enumerate(drafts) if draft >= 0})
