"""Replay: a recording's uploads through an executor alone, and its results compared.

`python -m services.compute.runner.replay FILE [MODEL]`, which is what `slipstream replay` runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError, ModelError
from services.compute.kernels.step_buffers import NUM_ROWS
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.executor import Executor, UploadKind
from services.compute.runner.recording import (
    DIGEST_INTS,
    RESULT,
    STEP_ID_INTS,
    TRANSFER,
    TRANSFERRED,
    Frame,
    Recording,
    result_ints,
)
from services.compute.runner.registry import load_executor
from services.compute.runner.uploads import StepUpload
from services.compute.step import Int32Array, StepResult

POLL_S = 0.0001
EQUAL = "bitwise equal"


class _Calls:
    """Makes the calls of a recording again, with the tickets that they return."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._launched: Any = None
        self._sampled: dict[int, Any] = {}  # by step
        self._transfers: list[Any] = []
        self.num_steps = 0
        self.step_id = -1

    def repeat(self, frame: Frame) -> None:
        executor, (kind, ints) = self._executor, frame
        if kind == TRANSFER:
            pages = PagePairs(*np.split(ints[1:], 2))
            self._transfers.append(executor.transfer(Direction(ints[0]), pages))
        elif kind == TRANSFERRED:
            while not executor.transferred(self._transfers[ints[0]]):
                time.sleep(POLL_S)
        else:
            executor.buffer(UploadKind(kind))[: len(ints)] = ints
            self._launch(kind, ints)

    def result(self, step_id: int) -> StepResult:
        return self._executor.result(self._sampled.pop(step_id))

    def _launch(self, kind: int, ints: Int32Array) -> None:
        executor, num_ints = self._executor, len(ints)
        if kind == UploadKind.ENTRIES:
            executor.enter(num_ints)
        elif kind == UploadKind.MASKS:
            self._sampled[self.step_id] = executor.sample(self._launched, num_ints)
        else:
            step = StepUpload.read(ints)
            self.step_id = step.step_id
            self.num_steps += bool(step.header[NUM_ROWS])
            with suppress(ValueError):  # prompts that cannot be scored: so it was
                self._launched = executor.forward(num_ints)


@dataclass(slots=True)
class Replay:
    """What a replay found; `difference` says where results part, `error` what ended it."""

    num_steps: int = 0
    num_results: int = 0
    num_tokens: int = 0
    difference: str = ""
    error: str = ""

    def run(self, executor: Executor, frames: Iterable[Frame]) -> Replay:
        """Execute all frames, up to the first difference or device error."""
        calls = _Calls(executor)
        try:
            for frame in frames:
                if frame.kind == RESULT:
                    step_id = int(frame.ints[:STEP_ID_INTS].view(np.int64)[0])
                    self._compare(calls.result(step_id), frame.ints)
                    if self.difference:
                        break
                else:
                    calls.repeat(frame)
        except Exception as error:  # whatever it is, it is what the replay was to show
            self.error = f"step {calls.step_id}: {error or type(error).__name__}"
        self.num_steps = calls.num_steps
        return self

    def _compare(self, result: StepResult, recorded: Int32Array) -> None:
        ours = result_ints(result)
        first = STEP_ID_INTS + DIGEST_INTS
        self.num_results += 1
        self.num_tokens += len(recorded) - first
        if np.array_equal(ours, recorded):
            return
        # both have as many samples: those of the same upload
        tokens = np.flatnonzero(ours[first:] != recorded[first:])
        where = "logprobs, scores or embeddings differ, and no token"
        if len(tokens):
            sample = int(tokens[0])
            ids = ours[first + sample], recorded[first + sample]
            where = f"sample {sample} is token {ids[0]} and was {ids[1]}"
        self.difference = f"step {result.step_id}: {where}"


def main(arguments: list[str]) -> int:
    """Replay a file, on another model folder than its own if one is given; returns the status."""
    try:
        recording = Recording(Path(arguments[0]))
        model = Path(arguments[1]) if len(arguments) > 1 else recording.model
    except ConfigError as error:
        sys.stderr.write(f"slipstream replay: {error}\n")
        return 2
    device = recording.settings.device
    try:
        executor = load_executor(model, recording.settings)
    except (ConfigError, ModelError) as error:
        about = f"{arguments[0]} was recorded with {model} on the device {device}"
        sys.stderr.write(f"slipstream replay: {about}, which cannot be loaded here: {error}\n")
        return 2
    found = Replay().run(executor, recording.frames())
    verdict = found.error or found.difference or EQUAL
    counted = f"{found.num_steps} steps, {found.num_results} results, {found.num_tokens} tokens"
    sys.stdout.write(f"{counted}: {verdict}\n")
    return 0 if verdict == EQUAL else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
