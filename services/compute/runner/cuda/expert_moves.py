"""Copies of experts are exchanged while a model serves: where most tokens go there are most copies.

Every rank counts the same tokens and looks at the counts after the same number of steps, so all
come to the same decision, and nobody tells another one. One expert of one layer is exchanged at a
time, by copies between two steps: graphs read the weights and the table where they are.

Shape legend: L layers that have experts, X experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog
import torch
from torch import Tensor

from services.compute.distributed.expert_balance import Layout, Replacement, better, slot_table
from services.compute.layers.expert_link import ExpertLink, expert_pieces
from services.compute.layers.parts import Experts
from services.compute.layers.weighted_layers import AnyLinear
from services.compute.runner.cuda.stream import DeviceStream, Mark
from services.compute.step import Int64Array

INTERVAL = 1024
"""Steps between two looks at what was counted: some seconds."""

DELAY = 8
"""Steps from a copy of the counts to the host to its use, so that nobody waits for it."""


class ExpertMoves:
    """Of all layers that have experts; `step` comes before each step of every rank."""

    def __init__(
        self,
        mixtures: Mapping[int, Experts[AnyLinear]],
        layouts: Mapping[int, Layout],
        rank: int,
        link: ExpertLink,
        stream: DeviceStream,
    ) -> None:
        self._mixtures = mixtures
        self._layouts = dict(layouts)
        self._rank = rank
        self._link = link
        self._stream = stream
        counts = [experts.tokens_X for experts in mixtures.values()]
        self._counts = [tokens_X for tokens_X in counts if tokens_X is not None]
        self._all_LX = torch.stack(self._counts)
        on_gpu = self._all_LX.is_cuda
        self._host_LX = torch.zeros(self._all_LX.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._copied: Mark | None = None
        self._before_LX: Int64Array = self._host_LX.numpy().copy()
        self._window: dict[int, list[int]] = {}  # tokens by layer, of those that wait for a look
        self._num_steps = self._num_moves = 0

    def step(self) -> None:
        """Another step begins."""
        place = self._num_steps % INTERVAL
        self._num_steps += 1
        if place == 0:
            torch.stack(self._counts, out=self._all_LX)
            self._host_LX.copy_(self._all_LX, non_blocking=True)
            self._copied = self._stream.mark()
        elif place == DELAY:
            self._look()
        elif self._window:
            layer, tokens_X = next(iter(self._window.items()))
            replacement = better(self._layouts[layer], tokens_X)
            if replacement is None:
                self._window.pop(layer)
            else:
                self._exchange(layer, replacement)

    def _look(self) -> None:
        """Take what was counted since the last look."""
        assert self._copied is not None
        self._copied.synchronize()
        counts_LX = self._host_LX.numpy().copy()
        window_LX = (counts_LX - self._before_LX).tolist()
        self._before_LX = counts_LX
        self._window = dict(zip(self._mixtures, window_LX, strict=True))
        if self._num_moves:
            structlog.get_logger().info("experts exchanged", moves=self._num_moves)
            self._num_moves = 0

    def _exchange(self, layer: int, replacement: Replacement) -> None:
        layout, experts = self._layouts[layer], self._mixtures[layer]
        rank, slot, expert = replacement
        source = next(each for each, held in enumerate(layout) if expert in held)
        pieces: list[Tensor] = []
        if self._rank in (source, rank):
            own = layout[source].index(expert) if self._rank == source else slot
            pieces = expert_pieces(experts, own)
        self._link.hand_on(pieces, source, rank)
        self._layouts[layer] = layout = replacement.of(layout)
        assert experts.held is not None
        slots_CX = experts.held.slots_CX
        table = slot_table(layout, self._rank, slots_CX.shape[1], len(slots_CX))
        host_CX = torch.from_numpy(table)
        if slots_CX.is_cuda:
            host_CX = host_CX.pin_memory()
        slots_CX.copy_(host_CX, non_blocking=True)
        self._num_moves += 1
