"""A model is found in a folder, or it is said plainly why not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import are_progress_bars_disabled

from benchmarks.model_folders import ModelShape, save_folder
from common.config import ModelSettings
from common.errors import ModelError
from services.launcher.model import find_model, weight_bytes
from services.launcher.plan import Counts, make_plan
from services.launcher.preflight import Machine, check
from tests.gguf_files import GgufOptions, write_gguf

PLAN = make_plan(None, {}, {}, Counts())
MACHINE = Machine(host_bytes=1 << 40, fast_bf16=True, why_no_gpu="there is none")


def folder_with(tmp_path: Path, *names: str) -> str:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    return str(tmp_path)


def hub_that(monkeypatch: pytest.MonkeyPatch, behaviour: object) -> list[dict[str, object]]:
    """Put a function in place of the hub; returns the arguments that it was called with."""
    calls: list[dict[str, object]] = []

    def snapshot_download(repo_id: str, **arguments: object) -> str:
        calls.append({"repo_id": repo_id, **arguments})
        if isinstance(behaviour, Exception):
            raise behaviour
        return str(behaviour)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def error_of(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    error = kind.__new__(kind)
    Exception.__init__(error, "the hub said no")
    return error


def test_a_folder_is_taken_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_with(tmp_path, "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path.parent)
    model = find_model(ModelSettings(path=tmp_path.name), with_weights=True)
    assert model.path == str(tmp_path)
    assert model.served_name == (tmp_path.name,)


@pytest.mark.parametrize("path", ["./none", "/no/such/folder", "a/b/c"])
def test_a_path_that_is_no_folder_is_not_asked_of_the_hub(path: str) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        find_model(ModelSettings(path=path), with_weights=True)


def test_a_file_of_a_model_is_answered_with_its_folder(tmp_path: Path) -> None:
    path = f"{folder_with(tmp_path, 'config.json', 'model.safetensors')}/model.safetensors"
    with pytest.raises(ModelError, match="is a file, .*; give the model's folder"):
        find_model(ModelSettings(path=path), with_weights=True)


def test_an_adapter_is_refused_with_what_makes_a_model_of_it(tmp_path: Path) -> None:
    path = folder_with(tmp_path, "adapter_config.json", "adapter_model.safetensors")
    with pytest.raises(ModelError, match="it is an adapter; merge it into its model"):
        find_model(ModelSettings(path=path), with_weights=True)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_model(ModelSettings(path=str(tmp_path)), with_weights=True)


def test_weights_that_are_not_safetensors_are_refused(tmp_path: Path) -> None:
    path = folder_with(tmp_path, "config.json", "pytorch_model.bin")
    with pytest.raises(ModelError, match="other formats are never loaded"):
        find_model(ModelSettings(path=path), with_weights=True)
    assert find_model(ModelSettings(path=path), with_weights=False).path == path


def test_a_hub_id_is_downloaded_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_with(tmp_path, "config.json", "model.safetensors")
    calls = hub_that(monkeypatch, path)
    model = find_model(ModelSettings(path="org/name", revision="v1"), with_weights=True)
    assert (model.path, model.served_name) == (path, ("org/name",))
    assert "*.safetensors" not in str(calls[0]["allow_patterns"])  # config.json may be enough
    patterns = calls[-1]["allow_patterns"]
    assert isinstance(patterns, list)
    assert "*.safetensors" in patterns
    assert not any(kind in str(patterns) for kind in (".bin", ".pt", ".ckpt", ".py"))
    assert calls[0]["revision"] == "v1"
    assert are_progress_bars_disabled()  # there is no terminal here


def test_a_model_that_cannot_be_served_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = hub_that(monkeypatch, folder_with(tmp_path, "config.json"))

    def refuse(folder: Path) -> None:
        raise ModelError("too large")

    with pytest.raises(ModelError, match="too large"):
        find_model(ModelSettings(path="org/name"), with_weights=True, inspect=refuse)
    assert not any("*.safetensors" in str(call["allow_patterns"]) for call in calls)


def test_a_model_without_a_tokenizer_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = hub_that(monkeypatch, folder_with(tmp_path, "config.json", "qwen.tiktoken"))
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        find_model(
            ModelSettings(path="org/name"), with_weights=True, inspect=partial(check, PLAN, MACHINE)
        )
    (call,) = calls
    assert "*.safetensors" not in str(call["allow_patterns"])
    assert "*.tiktoken" in str(call["allow_patterns"])


def test_a_gguf_file_is_served_from_a_folder_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = ModelShape(num_layers=1)
    folder = save_folder(tmp_path / "tiny", shape)
    write_gguf(folder, tmp_path / "tiny-Q8_0.gguf", GgufOptions("Q8_0"))
    monkeypatch.chdir(tmp_path)
    model = find_model(ModelSettings(path="tiny-Q8_0.gguf"), with_weights=True)
    assert model.served_name == ("tiny-Q8_0",)
    assert Path(model.path).is_relative_to(tmp_path / "cache")
    assert weight_bytes(Path(model.path), 4) == weight_bytes(folder, 4)


@pytest.mark.parametrize(("kind", "of_head"), [("F16", 0), ("Q8_0", 256 * 64 // 32 * 34)])
def test_the_blocks_of_a_gguf_embedding_count_for_a_tied_head_too(
    kind: str, of_head: int, tmp_path: Path
) -> None:
    tensors = {"model.embed_tokens.weight": {"type": kind, "shape": [256, 64]}}
    (tmp_path / "model.gguf.index.json").write_text(json.dumps({"tensors": tensors}))
    assert weight_bytes(tmp_path, 2) == 2 * 256 * 64 + of_head
    assert weight_bytes(tmp_path, 4) == 4 * 256 * 64


def test_gguf_files_that_are_not_named_get_a_sentence_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="there is no file /no/such/model.gguf"):
        find_model(ModelSettings(path="/no/such/model.gguf"), with_weights=True)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="it holds GGUF files; give one of them: .*/model.gguf"):
        find_model(ModelSettings(path=str(tmp_path)), with_weights=True)
    empty = tmp_path / "snapshot"
    empty.mkdir()
    hub_that(monkeypatch, empty)
    with pytest.raises(ModelError, match=r"org/x-GGUF has no config\.json; it holds GGUF files"):
        find_model(ModelSettings(path="org/x-GGUF"), with_weights=True)
    (tmp_path / "config.json").write_text("{}")  # as some repositories of GGUF files have
    with pytest.raises(ModelError, match=r"has no \*\.safetensors; it holds GGUF files; give one"):
        find_model(ModelSettings(path=str(tmp_path)), with_weights=True)


def test_weights_that_no_service_reads_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = hub_that(monkeypatch, folder_with(tmp_path, "config.json"))
    find_model(ModelSettings(path="org/name"), with_weights=False)
    assert "*.safetensors" not in str(calls[0]["allow_patterns"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (error_of(GatedRepoError), "is gated: accept its terms"),
        (error_of(RepositoryNotFoundError), "neither a folder here nor a model on the hub"),
        (error_of(RevisionNotFoundError), "has no revision v9"),
        (LocalEntryNotFoundError("no network"), "could not be fetched from the hub: no network"),
        (OSError("disk full"), "could not be fetched from the hub: disk full"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    hub_that(monkeypatch, error)
    with pytest.raises(ModelError, match=said):
        find_model(ModelSettings(path="org/name", revision="v9"), with_weights=True)
