"""A GGUF file becomes a folder that is made once, and of what cannot be served none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.model_folders import ModelShape, save_folder
from common.errors import ModelError
from common.gguf import folder as module
from common.gguf.file import GgufModel, read_model
from common.gguf.folder import contents_of, folder_of
from common.made_folder import FORMAT
from common.model_folder import (
    Pooling,
    describe,
    locate,
    read_pooling,
    revision_of,
    sampling_defaults,
)
from common.tokenizer_folder import load_tokenizer, read_folder
from tests.cases import num_cases
from tests.gguf_files import ARCHITECTURES, GgufOptions, write_gguf

More = Callable[[gguf.GGUFWriter], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "tiny", ModelShape())


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def file(original: Path, tmp_path: Path) -> Path:
    return write_gguf(original, tmp_path / "tiny.gguf")


def test_the_folder_holds_what_services_read(
    file: Path, original: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = folder_of(file, env)
    ours, theirs = read_folder(made), read_folder(original)
    assert ours.templates == theirs.templates
    assert ours.special_tokens == theirs.special_tokens
    text = "One train, two trains: 日本 <|end|>"
    expected = load_tokenizer(theirs).encode(text).ids
    assert load_tokenizer(ours).encode(text).ids == expected
    card = describe(made, ("tiny",))
    assert (card.vocab_size, card.max_model_len) == (512, 2048)
    monkeypatch.setenv("XDG_CACHE_HOME", env["XDG_CACHE_HOME"])
    assert locate(str(file)) == made


def test_it_is_made_once(file: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder_of(file, env)
    monkeypatch.setattr(module, "read_model", None)  # reading again would fail
    assert folder_of(file, env) == made


def test_another_file_of_the_same_name_is_another_model(
    file: Path, original: Path, env: dict[str, str]
) -> None:
    first = folder_of(file, env)
    write_gguf(original, file, GgufOptions("F16"))
    second = folder_of(file, env)
    assert first != second and revision_of(first) != revision_of(second)


def test_a_folder_of_an_older_form_is_not_used(
    file: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = folder_of(file, env)
    monkeypatch.setattr("common.made_folder.FORMAT", FORMAT + 1)
    assert folder_of(file, env) != older


def test_equal_files_in_two_places_have_one_revision(
    file: Path, env: dict[str, str], tmp_path: Path
) -> None:
    copy = tmp_path / "other" / file.name
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    first, second = folder_of(file, env), folder_of(copy, env)
    assert first != second and revision_of(first) == revision_of(second)


def test_processes_that_make_it_at_the_same_time_agree(file: Path, env: dict[str, str]) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(lambda _: folder_of(file, env), range(8)))
    (folder,) = made
    assert list(folder.parent.iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_is_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").touch()
    with pytest.raises(ModelError, match="cannot write .*; name another folder .*XDG_CACHE_HOME"):
        folder_of(file, {"XDG_CACHE_HOME": str(tmp_path / "blocked")})


def test_without_a_variable_the_cache_is_in_the_home(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_of(file, {}).parent == tmp_path / ".cache" / "slipstream" / "gguf"


def test_settings_of_sampling_templates_and_pooling_have_files(
    original: Path, env: dict[str, str], tmp_path: Path
) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_pooling_type(gguf.PoolingType.LAST)
        writer.add_string("tokenizer.chat_template.../tools", "{{ tools }}")

    made = folder_of(write_gguf(original, tmp_path / "x.gguf", GgufOptions(more=more)), env)
    assert sampling_defaults(made) == (("temperature", 0.5),)
    assert read_pooling(made) == Pooling("last", normalize=True)
    assert (made / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


def unknown_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((2, 2), np.float32))


def as_numbers(key: str) -> More:
    def add(writer: gguf.GGUFWriter) -> None:
        texts = writer.kv_data[0].pop(f"tokenizer.ggml.{key}").value
        writer.add_array(f"tokenizer.ggml.{key}", list(range(len(texts))))

    return add


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (unknown_tensor, "tensor blk.0.ffn_gate_inp.weight does not belong to the architecture"),
        (lambda writer: writer.add_pooling_type(gguf.PoolingType.RANK), "pooling of type 4"),
        (
            lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "rope scaling longrope is not supported",
        ),
        (as_numbers("merges"), "its metadata make no sense"),
        (as_numbers("tokens"), "holds no whole vocabulary"),
        (
            lambda writer: writer.add_array("llama.rope.dimension_sections", [8, 12, 12, 0]),
            "positions of images",
        ),
    ],
)
def test_what_no_family_computes_is_refused_by_name(
    more: More, message: str, original: Path, env: dict[str, str], tmp_path: Path
) -> None:
    file = write_gguf(original, tmp_path / "x.gguf", GgufOptions(more=more))
    with pytest.raises(ModelError, match=f"^{file}.* {message}"):
        folder_of(file, env)
    assert not os.path.exists(env["XDG_CACHE_HOME"])


def test_experts_of_an_architecture_without_them_are_refused(
    original: Path, env: dict[str, str], tmp_path: Path
) -> None:
    options = GgufOptions(architecture="qwen2", more=lambda writer: writer.add_expert_count(8))
    file = write_gguf(original, tmp_path / "x.gguf", options)
    with pytest.raises(ModelError, match="a mixture of experts .qwen2.expert_count"):
        folder_of(file, env)


@cache
def model_of(original: Path, folder: Path) -> GgufModel:
    options = GgufOptions(more=lambda writer: writer.add_sliding_window(8))
    return read_model(write_gguf(original, folder / "fuzzed.gguf", options))


VALUES = st.none() | st.booleans() | st.integers(-2, 1 << 40) | st.floats() | st.text(max_size=3)
KEYS = [
    "general.architecture", "llama.attention.head_count", "llama.attention.head_count_kv",
    "llama.attention.key_length", "llama.attention.value_length", "llama.block_count",
    "llama.embedding_length", "llama.context_length", "llama.rope.freq_base",
    "llama.rope.dimension_count", "llama.rope.scaling.type", "llama.rope.scaling.factor",
    "llama.attention.sliding_window", "llama.attention.sliding_window_pattern",
    "llama.expert_count", "llama.pooling_type", "tokenizer.ggml.model", "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges",
    "tokenizer.ggml.scores", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template", "tokenizer.chat_template.x", "general.sampling.temp",
]  # fmt: skip


@settings(max_examples=num_cases(200, 5000))
@given(
    changes=st.dictionaries(
        st.sampled_from(KEYS), VALUES | st.lists(VALUES, max_size=3), min_size=1, max_size=3
    )
)
@example(changes={"llama.attention.key_length": -1, "llama.attention.value_length": -1})
def test_metadata_of_any_kind_make_a_folder_or_are_refused(
    changes: dict[str, object], original: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = model_of(original, tmp_path_factory.getbasetemp())
    fuzzed = replace(model, metadata={**model.metadata, **changes})
    try:
        json.dumps(contents_of(fuzzed))
    except ModelError as error:
        assert str(model.paths[0]) in str(error)


def test_other_architectures_are_refused_by_name(env: dict[str, str], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = f"architecture mamba is not supported in GGUF files; these are: {min_name()}"
    with pytest.raises(ModelError, match=expected):
        folder_of(tmp_path / "x.gguf", env)


def min_name() -> str:
    return min(ARCHITECTURES.values())


def test_a_vocabulary_alone_is_no_model(env: dict[str, str], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="has no tensor token_embd.weight; it is a vocabulary"):
        folder_of(tmp_path / "x.gguf", env)
