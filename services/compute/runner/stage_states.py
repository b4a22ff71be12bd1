"""What passes from stage to stage on the CPU: hidden states, and beside them what came into the
layers that a head of the last stage sees.

Shape legend: T tokens, E hidden width, W that of all.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from services.compute.distributed.stages import WAIT_MS, Stages
from services.compute.models.eager_decoder import SeenStates


class StageStates:
    def __init__(
        self, stages: Stages, own: range, seen: tuple[int, ...], width: int, dtype: torch.dtype
    ) -> None:
        """`own` are this stage's layers; `seen` those of the model whose inputs a head sees."""
        self._stages, self._seen = stages, seen
        self._before = sorted({layer for layer in seen if layer < own.start})
        self._so_far = sorted({layer for layer in seen if layer < own.stop})
        self._width, self._dtype = width, dtype

    def watch(self) -> SeenStates | None:
        """What keeps the states of a step that are to be seen, if any are."""
        return SeenStates(self._seen) if self._seen else None

    def send(self, x_TE: Tensor, seen: SeenStates | None) -> None:
        """Hand on what was made here, and what was to be seen so far."""
        states = [] if seen is None else seen.of(self._so_far)
        self._stages.send(torch.cat((x_TE, *states), dim=1) if states else x_TE)

    def received(self, num_tokens: int, seen: SeenStates | None) -> Generator[bool, None, Tensor]:
        """What the stage before has made of so many tokens."""
        wide_TW = torch.empty(num_tokens, (1 + len(self._before)) * self._width, dtype=self._dtype)
        while not self._stages.receive(wide_TW, WAIT_MS):
            yield False
        if seen is None or not self._before:
            return wide_TW  # parts add to it
        x_TE, *states = torch.split(wide_TW, self._width, dim=1)
        for layer, state_TE in zip(self._before, states, strict=True):
            seen.see(layer, state_TE)
        return x_TE.contiguous()
