"""What the followers are sent makes them compute what the leader computes, bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import FatalError
from services.compute.config import ComputeSettings
from services.compute.runner.eager import load_eager
from services.compute.runner.executor import Executor, UploadKind
from services.compute.runner.frames import RESULT, Frame, RepeatedCalls
from services.compute.runner.leader import LeaderExecutor
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.recording import Recording, RecordingExecutor, result_ints
from services.compute.runner.upload_ring import RingMemory, RingReader, RingWriter
from services.compute.step import Int32Array
from tests.unit.compute.recorded_run import run_all_kinds
from tests.unit.compute.tiny_models import make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", page_tokens=8, max_num_seqs=8, max_prefill_tokens=16,
    max_batched_token_mem=1024, swap_space=0.01, num_threads=1, tensor_parallel_size=2,
    speculative_config="off",  # sequences are to be short of pages at the same time
)  # fmt: skip


class OneProcess:
    """A group whose one follower makes its calls here, when the ring is full and at the end."""

    def __init__(self, follower: Executor) -> None:
        self._memory = RingMemory.create(1, 8192)
        self._pipe = os.pipe()
        self._ring = RingWriter(self._memory, lambda reader: None, self.follow)
        self._reader = RingReader(self._memory, 0, self._pipe[0])
        self._calls = RepeatedCalls(follower)
        self._num_read = 0
        self.results: list[Int32Array] = []
        self.num_done = 0

    def send(self, kind: int, ints: Int32Array) -> None:
        self._ring.write(kind, ints)

    def sent_is_done(self) -> None:
        self.num_done = self._ring.num_frames

    def follow(self) -> None:
        self._num_read += 1
        result = self._calls.repeat(Frame(*self._reader.read(self._calls.room)))
        if result is not None:
            self.results.append(result_ints(result))

    def close(self) -> None:
        while self._num_read < self._ring.num_frames:
            self.follow()
        self._memory.close()
        for fd in self._pipe:
            os.close(fd)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("qwen3"), tmp_path_factory.mktemp("model"))


def test_a_follower_computes_what_the_leader_computes(model: Path, tmp_path: Path) -> None:
    """Every kind of request, with preemptions and swaps; the leader's own run is recorded."""
    group: Any = OneProcess(load_eager(model, SETTINGS))
    leader = LeaderExecutor(load_eager(model, SETTINGS), group)
    settings = SETTINGS.model_copy(update={"record_dir": str(tmp_path)})
    recording = RecordingExecutor.begin(leader, model, settings)
    num_preempted, num_swapped = run_all_kinds(PackingRunner(recording), SETTINGS, 20)
    assert num_preempted > 0 and num_swapped > 0
    recording.close()
    (file,) = tmp_path.iterdir()
    expected = [frame.ints for frame in Recording(file).frames() if frame.kind == RESULT]
    assert len(expected) > 20
    assert all(map(np.array_equal, group.results, expected))
    assert len(group.results) == len(expected)
    assert Recording(file).settings.tensor_parallel_size == 2


class Failing:
    """An executor whose calls fail."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def buffer(self, kind: UploadKind) -> Int32Array:
        return np.zeros(64, dtype=np.int32)

    def forward(self, num_ints: int) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (ValueError("this prompt cannot be scored"), ValueError),
        (RuntimeError("connection closed by peer"), FatalError),
        (MemoryError(), FatalError),
    ],
)
def test_what_not_all_ranks_may_have_met_ends_the_process(
    error: Exception, seen: type[Exception]
) -> None:
    failing: Any = Failing(error)
    group: Any = OneProcess(failing)
    with pytest.raises(seen):
        LeaderExecutor(failing, group).forward(64)
    assert group.num_done == 0
