"""Passes through layers whose calls of kernels are captured once, and replayed where the same
number of rows comes again (as CUDA graphs are, and for the same reason).

Captured is what consists of kernels alone: whatever else computes, a mixture of experts for
instance, is noticed and goes on being computed call by call.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.compute.kernels.cpu.graph import noted, packed, replay, replay_parts
from services.compute.kernels.cpu.team import num_threads, team_of
from services.compute.layers.eager_step import Layers
from services.compute.layers.parts import Hidden
from services.compute.layers.row_attention import RowAttention

ATEN = torch.ops.aten
COMPUTE_NOTHING = {
    *(ATEN.view, ATEN.slice, ATEN.select, ATEN.split, ATEN.unsqueeze, ATEN.expand, ATEN.alias),
    *(ATEN.empty, ATEN.new_empty, ATEN.empty_like, ATEN.detach, ATEN.as_strided, ATEN.unbind),
}


class PassState(Protocol):
    """What a step has beside its calls."""

    rope_rows: list[tuple[Tensor, Tensor]]
    delta_TE: Tensor | None
    """What the last part has added, times the scale: not yet in the stream."""
    scale: float


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether torch computes, and keeps what it makes, whose addresses are captured."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_computed = False
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.has_computed |= func.overloadpacket not in COMPUTE_NOTHING
        self.made.append(made)
        return made


class CapturedPass:
    """The pass of some rows."""

    def __init__(self, state: PassState, attention: RowAttention, hidden: Hidden) -> None:
        attention.make_room()
        self._state, self._attention, self._hidden = state, attention, hidden
        self._x_TE = hidden.x_TE
        self._watch = _Watch()
        self._team = team_of(num_threads())
        self._layers: list[npt.NDArray[np.int64]] = []  # their calls
        self._works: list[npt.NDArray[np.int64]] = []

    def capture(self, layers: Layers, step: Any) -> Generator[bool, None, bool]:
        """Go through the layers; returns whether that can be replayed."""
        for layer in layers:
            with noted() as calls, self._watch:
                layer(self._hidden, step)
            self._layers.append(calls_NS := packed(calls))
            team_ptr = self._team.ctypes.data
            self._works.append(np.array((calls_NS.ctypes.data, len(calls), team_ptr)))
            yield True
        self._delta_TE, self._scale = self._state.delta_TE, self._state.scale
        return not self._watch.has_computed

    def replay(
        self, state: PassState, attention: RowAttention, hidden: Hidden
    ) -> Generator[bool, None, bool]:
        """Go through the layers as another step; False, before anything is done, if its tables of
        pages have no room here."""
        if not self._attention.take(attention):
            return False
        own = self._state
        self._x_TE.copy_(hidden.x_TE)
        for here, there in zip(own.rope_rows, state.rope_rows, strict=True):
            for kept, rows in zip(here, there, strict=True):
                kept.copy_(rows)
        for work in self._works:
            replay(work.ctypes.data, replay_parts.address)
            yield True
        hidden.x_TE = self._hidden.x_TE
        state.delta_TE, state.scale = self._delta_TE, self._scale
        return True


class CapturedPasses:
    """Those of one model, by their number of rows."""

    def __init__(self) -> None:
        self._by_rows: dict[int, CapturedPass | None] = {}

    def can(self, num_rows: int) -> bool:
        """Unless a pass of so many rows was seen to consist of more than kernels."""
        return self._by_rows.get(num_rows, self) is not None

    def through(
        self, layers: Sequence[Any], step: Any, attention: RowAttention, hidden: Hidden
    ) -> Generator[bool, None, None]:
        """Take the residual stream through all layers; pauses after each."""
        num_rows = len(hidden.x_TE)
        kept = self._by_rows.get(num_rows)
        if kept is not None and (yield from kept.replay(step, attention, hidden)):
            return
        kept = CapturedPass(step, attention, hidden)
        is_whole = yield from kept.capture(layers, step)
        self._by_rows[num_rows] = kept if is_whole else None
