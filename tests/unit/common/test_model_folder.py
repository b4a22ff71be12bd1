"""A model folder is found and described the same way by every worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.model_folder import describe, locate, revision_of, sampling_defaults


def folder(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    values = {"vocab_size": 320, "max_position_embeddings": 64, **config}
    (path / "config.json").write_text(json.dumps(values))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"12345678")
    return path


def test_a_card_names_the_model_and_its_sizes(tmp_path: Path) -> None:
    card = describe(folder(tmp_path / "tiny"))
    assert (card.name, card.vocab_size, card.max_model_len) == ("tiny", 320, 64)
    assert describe(tmp_path / "tiny", ("other", "another")).names == ("other", "another")


def test_a_model_with_images_keeps_its_text_settings_inside(tmp_path: Path) -> None:
    inner = {"vocab_size": 7, "max_position_embeddings": 9}
    card = describe(folder(tmp_path, vocab_size=None, text_config=inner))
    assert (card.vocab_size, card.max_model_len) == (7, 9)


def test_equal_files_in_two_places_have_one_revision(tmp_path: Path) -> None:
    assert revision_of(folder(tmp_path / "a")) == revision_of(folder(tmp_path / "b"))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b'{"vocab_size": 321}'),
        ("generation_config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("tokenizer_config.json", b"{}"),
        ("special_tokens_map.json", b"{}"),
        ("chat_template.jinja", b"x"),
        ("additional_chat_templates/rag.jinja", b"x"),
        ("model.safetensors", b"123456789"),
        ("model-2.safetensors", b"1"),
        ("model.safetensors.index.json", b"{}"),
    ],
)
def test_every_file_that_decides_answers_is_in_the_revision(
    name: str, data: bytes, tmp_path: Path
) -> None:
    before = revision_of(folder(tmp_path))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data)
    assert revision_of(tmp_path) != before


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    before = revision_of(folder(tmp_path))
    (tmp_path / "README.md").write_text("hello")
    assert revision_of(tmp_path) == before


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"vocab_size": "many"}'])
def test_a_folder_that_is_no_model_is_refused_by_file(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        describe(tmp_path)


def test_a_folder_is_its_own_location(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == tmp_path


def test_a_path_that_leads_nowhere_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, message in ((tmp_path / "file", "is a file"), (tmp_path / "gone", "no folder")):
        with pytest.raises(ModelError, match=message):
            locate(str(path))


def test_a_hub_id_that_is_not_cached_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="download it first"):
        locate("nobody/nothing")


def test_the_models_own_sampling_settings_are_read(tmp_path: Path) -> None:
    assert sampling_defaults(folder(tmp_path)) == ()
    values = {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0}
    more = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": [1, 2], "typical_p": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps({**values, **more}))
    assert dict(sampling_defaults(tmp_path)) == values


def test_sampling_settings_that_are_null_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": null, "top_p": 1}')
    assert sampling_defaults(tmp_path) == (("top_p", 1.0),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "-0.1"),
        ("temperature", "NaN"),
        ("temperature", '"0.7"'),
        ("temperature", "true"),
        ("top_p", "0"),
        ("top_p", "1.5"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("top_k", "Infinity"),
        ("top_k", "1" + "0" * 400),
        ("min_p", "[0.1]"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "1e999"),
    ],
)
def test_a_sampling_setting_that_no_request_could_have_is_named(
    field: str, value: str, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"{field}": {value}}}')
    with pytest.raises(ModelError, match=rf"generation_config\.json: {field} should be") as caught:
        sampling_defaults(tmp_path)
    assert len(str(caught.value)) < len(str(tmp_path)) + 250
