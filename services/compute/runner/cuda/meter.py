"""Compiles and times launches on a GPU, as they will be launched while serving: in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

import structlog
import torch

from services.compute.runner.cuda.choosing import Launch
from services.compute.runner.cuda.compiling import Kernel, Kernels
from services.compute.runner.cuda.stream import DeviceStream

NAME = ("meter",)
MIN_CALLS = 20
MAX_CALLS = 40
"""Of a graph. Weights of different layers come in turn, so that each is read from memory."""

REPLAYS = 4


class GraphMeter:
    """A `Meter` on the stream of the runner."""

    def __init__(self, stream: DeviceStream, device: torch.device) -> None:
        self._stream = stream
        self._device = device
        self._log = structlog.get_logger()

    @torch.inference_mode()
    def compile(
        self, launches: Sequence[Launch], may_begin: Callable[[], bool], done: Launch
    ) -> list[bool]:
        kernels = Kernels(self._device)
        noted = [self._noted(kernels, launch) for launch in launches]
        kernels.load(may_begin, done)
        return [all(kernel.is_begun for kernel in each) for each in noted]

    def _noted(self, kernels: Kernels, launch: Launch) -> list[Kernel]:
        try:
            return kernels.note(launch)
        except Exception as error:  # `seconds` passes it over
            self._log.debug("a launch has no kernels", error=str(error)[:200])
            return []

    def seconds(self, launches: Sequence[Launch]) -> float:
        """The best of a few replays."""
        if not self._try(launches[0]):
            return float("inf")
        turns = list(islice(cycle(launches), max(MIN_CALLS, min(MAX_CALLS, len(launches)))))

        def launch_all() -> None:
            for launch in turns:
                launch()

        self._stream.record(NAME, launch_all)
        self._stream.replay(NAME)
        return min(self._replay_s() for _ in range(REPLAYS)) / len(turns)

    def _replay_s(self) -> float:
        begin = self._stream.mark()
        self._stream.replay(NAME)
        end = self._stream.mark()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _try(self, launch: Launch) -> bool:
        try:
            launch()
        except Exception as error:  # too much shared memory, mostly
            self._log.debug("a kernel is passed over", error=str(error)[:200])
            return False
        return True
