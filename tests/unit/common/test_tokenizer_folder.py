"""A model folder is read as transformers reads it: special tokens, added tokens, templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from common.errors import ModelError
from common.tokenizer_folder import load_tokenizer, read_folder, vocabulary_of
from tests.unit.tokenizer.vocabularies import CORPUS, KINDS, byte_level, write_folder

TEXTS = [
    *CORPUS[:6],
    "",
    " ",
    "  leading and trailing  ",
    "<s>special</s> in <|im_start|>user\ntext<|im_end|>",
    "mixed\u00a0spaces\u2003and\u200bzero-width, combining e\u0301",
    "\x00 control \x7f \ufeff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 👩\u200d👩\u200d👧 🇳🇴",
    "a" * 300,
]


def theirs(path: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(str(path))


@pytest.fixture(scope="module", params=KINDS)
def both(request: Any, tmp_path_factory: Any) -> tuple[Tokenizer, Any]:
    path = write_folder(tmp_path_factory.mktemp(request.param), KINDS[request.param]())
    return load_tokenizer(read_folder(path)), theirs(path)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encoding_equals_transformers(
    both: tuple[Tokenizer, Any], add_special_tokens: bool
) -> None:
    ours, reference = both
    for text in TEXTS:
        expected = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
        got = ours.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        assert got == expected, text


@given(text=st.text(max_size=60))
def test_encoding_any_text_equals_transformers(both: tuple[Tokenizer, Any], text: str) -> None:
    ours, reference = both
    expected = reference(text)["input_ids"]
    assert ours.encode_batch_fast([text], add_special_tokens=True)[0].ids == expected


def test_truncation_and_padding_for_training_do_not_touch_prompts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    path = write_folder(tmp_path, tokenizer)
    assert len(load_tokenizer(read_folder(path)).encode("hello " * 9).ids) > 16
    assert len(load_tokenizer(read_folder(path)).encode("a").ids) == 2


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens as objects": {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True},
    },
    "no padding token": {"pad_token": None},
    "a token of its own": {"image_token": "<image>"},
    "extra tokens by name": {"extra_special_tokens": {"audio_token": "<audio>"}},
    "extra tokens in a list": {"extra_special_tokens": ["<one>", "<two>"]},
    "additional tokens": {"additional_special_tokens": ["<one>", "</s>"]},
    "a decoder table": {
        "added_tokens_decoder": {
            "0": {"content": "<s>", "special": True, "normalized": False},
            "900": {"content": "<late>", "special": False, "normalized": True, "lstrip": True},
        },
        "eos_token": "<late>",
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_special_and_added_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path, byte_level(), **SETTINGS[name])
    folder, reference = read_folder(path), theirs(path)
    assert folder.special_tokens == reference.special_tokens_map
    ours = load_tokenizer(folder)
    text = "a <image> b <audio> c<one><two> d <late> e </s>"
    assert ours.encode(text).ids == reference(text)["input_ids"]
    assert ours.get_vocab_size() == len(reference)


def test_an_old_folder_keeps_its_special_tokens_in_a_map(tmp_path: Path) -> None:
    path = write_folder(tmp_path, byte_level())
    special = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|im_end|>"}
    (path / "special_tokens_map.json").write_text(json.dumps(special))
    assert read_folder(path).special_tokens == theirs(path).special_tokens_map


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": "single"}, {}),
        ({"chat_template": [{"name": "default", "template": "a"}]}, {}),
        (
            {
                "chat_template": [
                    {"name": "default", "template": "a"},
                    {"name": "tool_use", "template": "b"},
                    {"name": "rag", "template": "c"},
                ]
            },
            {},
        ),
        ({"chat_template": "from the settings"}, {"chat_template.jinja": "from the file"}),
        (
            {},
            {
                "chat_template.jinja": "a",
                "additional_chat_templates/tool_use.jinja": "b",
                "additional_chat_templates/rag.jinja": "c",
            },
        ),
        ({}, {}),
    ],
)
@pytest.mark.parametrize("tools", [None, [{"type": "function"}]])
def test_the_template_is_chosen_as_transformers_chooses(
    config: dict[str, Any], files: dict[str, str], tools: Any, tmp_path: Path
) -> None:
    path = write_folder(tmp_path, byte_level(), **config)
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    try:
        expected = theirs(path).get_chat_template(tools=tools)
    except ValueError:
        expected = None
    assert read_folder(path).template_for(has_tools=tools is not None) == expected


def test_a_missing_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_folder(tmp_path)


def test_a_broken_vocabulary_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be loaded"):
        load_tokenizer(read_folder(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '{"chat_template": 5}', '{"chat_template": [{}]}'])
def test_broken_settings_are_named(text: str, tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        read_folder(tmp_path)


def test_a_folder_without_settings_has_no_template(tmp_path: Path) -> None:
    Tokenizer(byte_level().model).save(str(tmp_path / "tokenizer.json"))
    folder = read_folder(tmp_path)
    assert folder.templates == {} and folder.special_tokens == {}
    assert folder.template_for(has_tools=False) is None


def test_an_added_token_keeps_its_flags(tmp_path: Path) -> None:
    token = {"content": "<late>", "special": False, "lstrip": True, "rstrip": True}
    path = write_folder(tmp_path, byte_level(), added_tokens_decoder={"900": token})
    added = read_folder(path).added_tokens[0]
    assert isinstance(added, AddedToken)
    assert (added.content, added.special, added.lstrip, added.rstrip) == (
        "<late>",
        False,
        True,
        True,
    )


def _changed(path: Path, name: str, **values: Any) -> None:
    file = path / name
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**known, **values}))


def test_models_whose_prompts_and_texts_are_the_same_have_one_vocabulary(tmp_path: Path) -> None:
    small, large = (write_folder(tmp_path / name, byte_level()) for name in ("small", "large"))
    _changed(large, "config.json", hidden_size=8192, vocab_size=152_064)
    _changed(large, "generation_config.json", temperature=0.6)
    _changed(large, "tokenizer_config.json", model_max_length=131_072, name_or_path="large")
    _changed(large, "tokenizer.json", padding={"strategy": "BatchLongest"})
    assert vocabulary_of(small) == vocabulary_of(large) != ""


@pytest.mark.parametrize(
    "change",
    [
        {"chat_template": "{{ messages[0].content }}"},
        {"bos_token": "<another>"},
        {"added_tokens_decoder": {"400": {"content": "<call>", "special": True}}},
    ],
)
def test_a_template_or_a_token_of_its_own_is_another_vocabulary(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    one, other = (write_folder(tmp_path / name, byte_level()) for name in ("one", "other"))
    _changed(other, "tokenizer_config.json", **change)
    assert vocabulary_of(one) != vocabulary_of(other)


def test_a_folder_without_a_tokenizer_has_no_vocabulary(tmp_path: Path) -> None:
    assert vocabulary_of(tmp_path) == ""
