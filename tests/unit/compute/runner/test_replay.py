"""What was recorded comes out of a second process, which has a runner and nothing else, again."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.compute.runner.eager import load_eager
from services.compute.runner.executor import UploadKind
from services.compute.runner.frames import RESULT, TRANSFER, TRANSFERRED
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.recording import FORMAT, Recording, RecordingExecutor
from services.compute.runner.registry import load_runner
from services.compute.runner.replay import EQUAL, Replay, main
from tests.unit.compute.prompt_run import save_embedding_model
from tests.unit.compute.recorded_run import frames_of, record, run_all_kinds, with_another_token
from tests.unit.compute.tiny_models import make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", page_tokens=8, max_num_seqs=8, max_prefill_tokens=16,
    max_batched_token_mem=1024, swap_space=0.01, num_threads=1,
    speculative_config="off",  # sequences are to be short of pages at the same time
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model("qwen3")
    folder = save_embedding_model(made, tmp_path_factory.mktemp("model"), "mean")
    save_model(made, folder)
    return folder


@pytest.fixture(scope="module")
def recording(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    file, _, num_swapped = record(load_eager(model, SETTINGS), folder, model, SETTINGS)
    assert num_swapped > 0
    return file


def replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_kind_of_request_is_in_the_recording(recording: Path) -> None:
    frames = frames_of(recording)
    assert sum(frame.kind == UploadKind.MASKS and len(frame.ints) > 0 for frame in frames) == 6
    kinds = {frame.kind for frame in frames}
    assert kinds == {*UploadKind, RESULT, TRANSFER, TRANSFERRED}


def test_a_second_process_says_bitwise_the_same(recording: Path) -> None:
    done = replay(recording)
    assert done.returncode == 0, done.stderr
    results = sum(frame.kind == RESULT for frame in frames_of(recording))
    assert f"{results} results" in done.stdout
    assert done.stdout.endswith("tokens: bitwise equal\n")


def test_so_does_a_run_whose_preempted_sequences_compute_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executor = load_eager(model, SETTINGS)
    file, num_preempted, num_swapped = record(executor, tmp_path, model, SETTINGS, host_pages=0)
    assert num_preempted > 0 and num_swapped == 0
    assert main([str(file)]) == 0
    assert capsys.readouterr().out.endswith(f"tokens: {EQUAL}\n")


def test_a_recording_whose_writer_was_killed_is_replayed_up_to_there(
    recording: Path, tmp_path: Path
) -> None:
    (tmp_path / "cut").write_bytes(recording.read_bytes()[:-7])
    cut = Recording(tmp_path / "cut")
    found = Replay().run(load_eager(cut.model, cut.settings), cut.frames())
    assert (found.difference, found.error) == ("", "")
    assert found.num_results == sum(frame.kind == RESULT for frame in frames_of(recording)) - 1


def test_another_token_is_a_difference_that_is_told(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(with_another_token(recording, 3))
    other = Recording(tmp_path / "other")
    found = Replay().run(load_eager(other.model, other.settings), other.frames())
    assert found.num_results == 3
    assert "is token" in found.difference and "and was" in found.difference


def test_a_setting_makes_a_file_for_each_process(model: Path, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"record_dir": str(tmp_path / "new")})
    runner = load_runner(model, settings)
    runner.close()
    (file,) = (tmp_path / "new").iterdir()
    assert Recording(file).settings.record_dir == ""
    assert Recording(file).model == model.resolve()


def test_what_is_no_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(name: str) -> str:
        assert main([str(tmp_path / name)]) == 2
        return capsys.readouterr().err

    (tmp_path / "text").write_text("something else\n")
    (tmp_path / "list").write_bytes(FORMAT + b"[1]\n")
    assert "does not describe a run" in said("list")
    assert "is no recording of this version" in said("text")
    assert "absent" in said("absent")
    assert replay(tmp_path / "absent").returncode == 2


def test_a_folder_that_cannot_be_written_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = SETTINGS.model_copy(update={"record_dir": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match="no file can be made there"):
        RecordingExecutor.begin(load_eager(model, SETTINGS), model, settings)


class FullDisk(io.BytesIO):
    """Takes so many bytes and no more."""

    name = "full"

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.kept = b""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        self.kept += taken
        return len(taken)


@pytest.mark.parametrize("room", [0, 300, 1001, 5003])
def test_a_full_disk_ends_the_recording_and_nothing_else(model: Path, room: int) -> None:
    file = FullDisk(room)
    runner = PackingRunner(RecordingExecutor(load_eager(model, SETTINGS), file))
    assert run_all_kinds(runner, SETTINGS, 20)[1] > 0
    assert file.closed and len(file.kept) <= room
    runner.close()


def test_the_length_that_the_settings_leave_open_stays_open(tmp_path: Path) -> None:
    """Phi-3 chooses its factors by the longest that the model could have, not the cache."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config = {"rope_parameters": {**rope, "original_max_position_embeddings": 64}}
    folder = save_model(make_model("llama", max_position_embeddings=512, **config), tmp_path / "m")
    settings = SETTINGS.model_copy(update={"max_batched_token_mem": 256})
    executor = load_eager(folder, settings)
    assert executor.spec().max_model_len == 256
    file, *_ = record(executor, tmp_path / "recordings", folder, settings)
    recording = Recording(file)
    again = load_eager(recording.model, recording.settings)
    assert again.spec() == executor.spec()
    assert Replay().run(again, recording.frames()).difference == ""


def test_only_its_user_may_read_a_recording(recording: Path) -> None:
    assert recording.stat().st_mode & 0o077 == 0


def test_a_device_without_uploads_is_not_recorded(tmp_path: Path) -> None:
    settings = ComputeSettings(device="sim", record_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="the device sim has nothing to record"):
        load_runner(tmp_path, settings)
