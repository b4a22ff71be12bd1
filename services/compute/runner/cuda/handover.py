"""What a stage on a GPU gets from the stage before, and gives to the next.

It goes through the host, so that GPUs of one host and of several are the same.

The device waits for no copy but that of the step's own rows, and this thread for none at all: what
leaves is sent by another one, when it has come to the host.

Shape legend: T tokens, E hidden width.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Protocol

import structlog
import torch
from torch import Tensor

from common.errors import EXIT_FATAL
from services.compute.distributed.stages import WAIT_MS, Stages
from services.compute.runner.cuda.stream import DeviceStream, Mark

POLL_S = 0.00005
"""Between two looks of the process that leads, whose loop has other steps' results to collect."""


class Handover(Protocol):
    """The hidden states at both ends of a step."""

    def received(self, num_tokens: int) -> bool:
        """Whether a step's hidden states lie, or will lie when it begins, where it finds them."""
        ...

    def hand_on(self, num_tokens: int) -> Mark | None:
        """Give the next stage what the step launched last leaves; returns the mark of its end, None
        where nothing is given."""
        ...

    def close(self) -> None: ...


class NoHandover:
    """That of a model whose steps begin and end here."""

    def received(self, num_tokens: int) -> bool:
        return True

    def hand_on(self, num_tokens: int) -> Mark | None:
        return None

    def close(self) -> None:
        pass


NO_HANDOVER = NoHandover()


class StageHandover:
    """That of a stage, whose hidden states are in one place of the device's memory."""

    def __init__(self, stages: Stages, stream: DeviceStream, hidden_TE: Tensor) -> None:
        self._stages = stages
        self._stream = stream
        self._hidden_TE = hidden_TE
        is_first, self._leads = stages.number == 0, stages.number == stages.count - 1
        # one for each step that may be under way, and one that is being written
        num_rooms = stages.count + 1
        self._arrivals: deque[tuple[Mark, Tensor]] = deque()
        for _ in range(0 if is_first else num_rooms):
            self._arrivals.append((stream.mark(), self._room()))
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._leaving: SimpleQueue[tuple[Mark, Tensor, int] | None] = SimpleQueue()
        for _ in range(0 if self._leads else num_rooms):
            self._free.put(self._room())
        self._sender = threading.Thread(target=self._send_all, name="hidden states", daemon=True)
        self._sender.start()

    def received(self, num_tokens: int) -> bool:
        if not self._arrivals:
            return True
        copied, room_TE = self._arrivals[0]
        copied.synchronize()  # long ago
        rows_TE = room_TE[:num_tokens]
        if not self._stages.receive(rows_TE, 0 if self._leads else WAIT_MS):
            if self._leads:
                time.sleep(POLL_S)
            return False
        self._hidden_TE[:num_tokens].copy_(rows_TE, non_blocking=True)
        self._arrivals.popleft()
        self._arrivals.append((self._stream.mark(), room_TE))
        return True

    def hand_on(self, num_tokens: int) -> Mark | None:
        if self._leads:
            return None
        room_TE = self._free.get()
        room_TE[:num_tokens].copy_(self._hidden_TE[:num_tokens], non_blocking=True)
        mark = self._stream.mark()
        self._leaving.put((mark, room_TE, num_tokens))
        return mark

    def close(self) -> None:
        self._leaving.put(None)
        self._sender.join()
        self._stages.close()

    def _room(self) -> Tensor:
        pinned = self._hidden_TE.is_cuda
        return torch.empty_like(self._hidden_TE, device="cpu", pin_memory=pinned)

    def _send_all(self) -> None:
        try:
            while (leaving := self._leaving.get()) is not None:
                mark, room_TE, num_tokens = leaving
                mark.synchronize()
                self._stages.send(room_TE[:num_tokens].clone())
                self._free.put(room_TE)
        except Exception as error:  # the device's: no stage goes on without this one
            structlog.get_logger().critical("stage failed", exc_info=error)
            os._exit(EXIT_FATAL)
