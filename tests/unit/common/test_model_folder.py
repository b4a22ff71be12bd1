"""A model folder is found and described the same way by every worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.messages.control import Matryoshka
from common.model_folder import (
    Pooling,
    describe,
    locate,
    read_matryoshka,
    read_pooling,
    revision_of,
    sampling_defaults,
)

KIND = "sentence_transformers.models."


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 10**9),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**12),
        ("max_position_embeddings", 10**15),
        ("max_position_embeddings", 1e15),
        ("eos_token_id", 10**9),
        ("eos_token_id", [2, 10**9]),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_sizes_beyond_any_models_are_refused(
    name: str, value: Any, inside: bool, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 7, "max_position_embeddings": 9, name: value}
    is_inside = inside and name != "eos_token_id"
    with pytest.raises(ModelError, match=rf"config.json: {name} is 1(0{{9,}}|e\+15).* damaged"):
        describe(folder(tmp_path, **({"text_config": sizes} if is_inside else sizes)))


def test_an_end_beyond_any_vocabulary_is_refused_in_the_other_file_too(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 1000000000]}')
    with pytest.raises(ModelError, match="eos_token_id is 1000000000"):
        describe(path)


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


def write(folder: Path, config: dict[str, Any], *kinds: str) -> Path:
    """A folder whose modules are a transformer and these."""
    modules = [{"idx": 0, "path": "", "type": KIND + "Transformer"}]
    modules += [
        {"idx": n, "path": f"{n}_{kind}", "type": KIND + kind} for n, kind in enumerate(kinds, 1)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_for_text_does_not_pool(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, Matryoshka((), True)),
        ({"matryoshka_dimensions": [64, 32, 64]}, Matryoshka((32, 64), True)),
    ],
)
def test_a_folder_says_whether_embeddings_may_be_cut_short(
    tmp_path: Path, config: dict[str, Any], expected: Matryoshka | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_matryoshka(tmp_path) is None  # not a model for embeddings
    write(tmp_path, {"pooling_mode": "mean"}, "Pooling", "Normalize")
    assert read_matryoshka(tmp_path) == expected


@pytest.mark.parametrize("sizes", [5, [0], ["64"], [True]])
def test_sizes_that_are_none_are_refused(tmp_path: Path, sizes: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"matryoshka_dimensions": sizes}))
    with pytest.raises(ModelError, match="matryoshka_dimensions"):
        read_matryoshka(write(tmp_path, {"pooling_mode": "mean"}, "Pooling"))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_kind_is_read_and_whether_lengths_become_one(
    tmp_path: Path, config: dict[str, Any], kind: Any
) -> None:
    assert read_pooling(write(tmp_path, config, "Pooling")) == Pooling(kind, False)
    both = read_pooling(write(tmp_path, config, "Pooling", "Normalize"))
    assert both == Pooling(kind, True)


@pytest.mark.parametrize(
    ("config", "kinds", "match"),
    [
        ({"pooling_mode_max_tokens": True}, ("Pooling",), "pooling max is not supported"),
        ({"pooling_mode_weightedmean_tokens": True}, ("Pooling",), "weightedmean"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            ("Pooling",),
            "pooling mean and cls",
        ),
        ({}, ("Pooling",), "of no kind"),
        ({"pooling_mode_cls_token": True}, ("Pooling", "Dense"), "Dense"),
        ({"pooling_mode_cls_token": True}, ("Pooling", "Pooling"), "Pooling"),
        ({"pooling_mode_cls_token": True}, (), "names no Pooling"),
        ({"pooling_mode_cls_token": True}, ("Normalize",), "Normalize"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    tmp_path: Path, config: dict[str, Any], kinds: tuple[str, ...], match: str
) -> None:
    with pytest.raises(ModelError, match=match):
        read_pooling(write(tmp_path, config, *kinds))


@pytest.mark.parametrize("name", ["", "../1_Pooling", "/etc"])
def test_a_pooling_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    modules = [{"path": name, "type": KIND + "Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="outside the folder"):
        read_pooling(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_modules_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooling(tmp_path)


def test_another_pooling_is_another_revision(tmp_path: Path) -> None:
    seen = {revision_of(tmp_path)}
    for mode in ("mean", "cls"):
        seen.add(revision_of(write(tmp_path, {"pooling_mode": mode}, "Pooling")))
    seen.add(revision_of(write(tmp_path, {"pooling_mode": mode}, "Pooling", "Normalize")))
    assert len(seen) == 4
