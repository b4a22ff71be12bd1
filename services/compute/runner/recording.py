"""Recordings: every upload of a run and what came of it, so that it can be replayed bit by bit.

A file is a line that names the format, a line of JSON that says what the executor was made of, and
frames (`runner.frames`): a kind, a number of int32, the int32. Uploads are kept as the executor got
them, results as their tokens and a digest of all the rest. Frames are in the order of the calls; a
file whose writer was killed ends in the middle of one.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import structlog
import torch

from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.executor import Executor, OuterExecutor, UploadKind
from services.compute.runner.frames import (
    RESULT,
    TRANSFER,
    TRANSFERRED,
    Frame,
    step_id_ints,
    transfer_ints,
)
from services.compute.runner.protocol import RunnerSpec
from services.compute.step import Int32Array, StepResult

FORMAT = b"slipstream recording 1\n"
DIGEST_INTS = 4

_HEAD = struct.Struct("<II")


def result_ints(result: StepResult) -> Int32Array:
    """Step id (low, high), a digest of everything the device computed, valid tokens by sample."""
    digest = blake2b(digest_size=4 * DIGEST_INTS)
    for array in (result.tokens, result.n_valid, result.nonfinite):
        digest.update(np.ascontiguousarray(array).tobytes())
    for sample, logprobs in sorted(result.logprobs.items()):
        digest.update(repr((sample, logprobs)).encode())
    for row, scores in sorted(result.scores.items()):
        digest.update(row.to_bytes(4, "little"))
        for values in (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs):
            digest.update(np.ascontiguousarray(values).tobytes())
    for row, embedding in sorted(result.embeddings.items()):
        digest.update(row.to_bytes(4, "little") + np.ascontiguousarray(embedding).tobytes())
    summary = np.frombuffer(digest.digest(), dtype=np.int32)
    tokens = np.where(result.n_valid > 0, result.tokens[:, 0], -1).astype(np.int32)
    return np.concatenate((step_id_ints(result.step_id), summary, tokens))


class RecordingExecutor(OuterExecutor):
    """An executor whose uploads and results go to a file, too.

    Written without a buffer of its own, so that a crash loses nothing of what led to it. A steady
    step costs the host 8 to 12 us for its three frames, most of it for the digest of the result.
    """

    def __init__(self, executor: Executor, file: BinaryIO) -> None:
        super().__init__(executor)
        self._file: BinaryIO | None = file
        self._num_transfers = 0

    @staticmethod
    def begin(executor: Executor, model: Path, settings: ComputeSettings) -> RecordingExecutor:
        """Record into a new file of the folder that the settings name.

        Raises ConfigError where no file can be made there.
        """
        folder = Path(settings.record_dir)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.recording"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # it holds what people wrote: no one else may read it
            file = open(path, "xb", buffering=0, opener=lambda p, flags: os.open(p, flags, 0o600))
        except OSError as error:
            raise ConfigError(
                f"compute.record_dir is {folder}, and no file can be made there: {error}"
            ) from error
        about = how_to_repeat(executor.spec(), model, settings)
        file.write(FORMAT + json.dumps(about).encode() + b"\n")
        return RecordingExecutor(executor, file)

    def enter(self, num_ints: int) -> None:
        self._upload(UploadKind.ENTRIES, num_ints)
        self._executor.enter(num_ints)

    def forward(self, num_ints: int) -> Any:
        self._upload(UploadKind.STEP, num_ints)
        return self._executor.forward(num_ints)

    def sample(self, ticket: Any, num_ints: int) -> Any:
        self._upload(UploadKind.MASKS, num_ints)
        return self._executor.sample(ticket, num_ints)

    def result(self, ticket: Any) -> StepResult:
        result = self._executor.result(ticket)
        self._write(RESULT, result_ints(result))
        return result

    def transfer(self, direction: Direction, pages: PagePairs) -> tuple[int, Any]:
        self._write(TRANSFER, transfer_ints(direction, pages))
        self._num_transfers += 1
        return self._num_transfers - 1, self._executor.transfer(direction, pages)

    def transferred(self, ticket: tuple[int, Any]) -> bool:
        number, inner = ticket
        done = self._executor.transferred(inner)
        if done:  # steps from here on may use its pages
            self._write(TRANSFERRED, np.array([number], dtype=np.int32))
        return done

    def close(self) -> None:
        self._executor.close()
        if self._file is not None:
            self._file.close()

    def _upload(self, kind: UploadKind, num_ints: int) -> None:
        self._write(kind, self._executor.buffer(kind)[:num_ints])

    def _write(self, kind: int, ints: Int32Array) -> None:
        """Add a frame; where that fails, as on a full disk, the recording ends and no more."""
        if self._file is None:
            return
        frame = _HEAD.pack(kind, len(ints)) + ints.tobytes()
        try:
            if self._file.write(frame) == len(frame):
                return
            error = "no space is left"
        except OSError as failure:
            error = str(failure)
        structlog.get_logger().error("recording ended", file=self._file.name, error=error)
        self._file.close()
        self._file = None


def how_to_repeat(spec: RunnerSpec, model: Path, settings: ComputeSettings) -> dict[str, Any]:
    """What the same executor is made of: the model's folder and settings that size it alike."""
    groups, page_tokens = len(spec.kv_groups), spec.kv_groups[0].page_tokens
    sizes = {
        "device": "cuda" if spec.overlaps else "cpu",
        "num_threads": torch.get_num_threads(),
        "record_dir": "",
        "pipeline_stages": (),  # all of them where it is replayed
        "max_batched_token_mem": -(-spec.num_pages // groups) * page_tokens,
    }
    return {"model": str(model.resolve()), "settings": {**settings.model_dump(), **sizes}}


class Recording:
    """A recording that is read back.

    Raises ConfigError for a file that is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                first, about = file.readline(), file.readline()
                self._start = file.tell()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        if first != FORMAT:
            raise ConfigError(f"{path} is no recording of this version of slipstream.")
        try:
            values = json.loads(about)
            self.model = Path(values["model"])
            self.settings = ComputeSettings(**values["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: its second line does not describe a run: {error}"
            ) from error

    def frames(self) -> Iterator[Frame]:
        """All whole frames."""
        with self._path.open("rb") as file:
            file.seek(self._start)
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                kind, num_ints = _HEAD.unpack(head)
                data = file.read(4 * num_ints)
                if len(data) < 4 * num_ints:
                    return
                yield Frame(kind, np.frombuffer(data, dtype=np.int32))
