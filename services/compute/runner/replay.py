"""Replay: a recording's uploads through an executor alone, and its results compared.

`python -m services.compute.runner.replay FILE [MODEL]`, which is what `slipstream replay` runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import ConfigError, ModelError
from services.compute.runner.executor import Executor
from services.compute.runner.frames import STEP_ID_INTS, Frame, RepeatedCalls
from services.compute.runner.recording import DIGEST_INTS, Recording, result_ints
from services.compute.runner.registry import load_whole
from services.compute.step import Int32Array, StepResult

EQUAL = "bitwise equal"


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
        calls = RepeatedCalls(executor)
        try:
            for frame in frames:
                calls.room(frame.kind, len(frame.ints))[:] = frame.ints
                result = calls.repeat(frame)
                if result is not None:
                    self._compare(result, frame.ints)
                    if self.difference:
                        break
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
        executor = load_whole(model, recording.settings)
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
