"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from common.errors import ModelError
from common.gguf.file import read_model
from common.gguf.tokenizer import GgufTokenizer
from common.pre_tokenizers import PRE_TOKENIZERS
from common.text_growth import check_growth
from tests.cases import num_cases
from tests.gguf_files import add_tokenizer
from tests.unit.detokenizer.vocabularies import data_file
from tests.unit.tokenizer.vocabularies import CORPUS

CONTROL = ["<|bos|>", "<|end|>", "<|im_end|>"]
USER_DEFINED = ["<tool_call>", "日本"]
BLANKS = ["▁▁", "▁▁▁", "▁▁▁▁"]  # as Gemma has them
WORDS = [
    *"aA1é \n\t.'", "'s", "'LL", "  ", "\r\n", "123456", "héllo", "HTTPServer", "日本語", "ไทย",
    "e\u0301", "🙂", "Ünï", "/path", "<|end|>", "<tool_call>", "\u00a0", "\x00", "٣", "Ⅻ", "ﬁ",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=20).map("".join)
UNMERGED = "ĠHTTPServer"  # a token that no merges make
NUM_CASES = num_cases(60, 3000)

# As tokenizer.json of Llama 3, Qwen2, Mistral Nemo, Phi-4-mini and DeepSeek-V3 has them, and the
# code of Kimi K2.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")


def split(*patterns: str) -> list[Any]:
    steps: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


@dataclass(frozen=True)
class Original:
    """How a model splits texts, and what goes with it."""

    steps: Callable[[], list[Any]]
    nfc: bool = False
    ignore_merges: bool = False


def gpt2_steps() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False)]


def digits_steps() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *gpt2_steps()]


ORIGINALS = {
    "gpt-2": Original(gpt2_steps),
    "smollm": Original(digits_steps),
    "command-r": Original(digits_steps, nfc=True),
    "llama-bpe": Original(lambda: split(LLAMA3), ignore_merges=True),
    "chatglm-bpe": Original(lambda: split(LLAMA3)),
    "qwen2": Original(lambda: split(QWEN2), nfc=True),
    "deepseek-r1-qwen": Original(lambda: split(QWEN2)),
    "hunyuan": Original(lambda: split(QWEN2), nfc=True, ignore_merges=True),
    "tekken": Original(lambda: split(TEKKEN), ignore_merges=True),
    "gpt-4o": Original(lambda: split(GPT4O)),
    "kimi-k2": Original(lambda: split(r"[\p{Han}]+|" + KIMI), ignore_merges=True),
    "deepseek-v3": Original(lambda: split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3)),
}


def trained(original: Original) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=original.ignore_merges))
    tokenizer.normalizer = normalizers.NFC() if original.nfc else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(original.steps())
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, *WORDS * 2], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    described = json.loads(tokenizer.to_str())
    described["model"]["vocab"][UNMERGED] = tokenizer.get_vocab_size()
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in USER_DEFINED])
    return tokenizer


def written(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> GgufTokenizer:
    """A file of metadata only, read again."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = read_model(path)
    return GgufTokenizer(model.paths[0], model.metadata)


def loaded(described: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(described, ensure_ascii=False))
    check_growth(tokenizer)
    return tokenizer


@cache
def both(pre: str, folder: Path) -> tuple[Tokenizer, Tokenizer]:
    theirs = trained(ORIGINALS[pre])
    theirs.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = written(folder / "x.gguf", lambda writer: add_tokenizer(writer, folder, pre))
    return loaded(found.tokenizer_json()), theirs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("pre", ORIGINALS)
@settings(max_examples=NUM_CASES)
@given(text=TEXTS, adds=st.booleans())
@example(text="one HTTPServer, two", adds=False)
@example(text="I'll pay 1234567 for HTTPServers, isn't it?\r\n\r\n  日本語 e\u0301", adds=True)
def test_texts_have_the_ids_of_the_original(pre: str, text: str, adds: bool, folders: Path) -> None:
    folder = folders / pre
    folder.mkdir(exist_ok=True)
    ours, theirs = both(pre, folder)
    expected = theirs.encode(text, add_special_tokens=adds).ids
    assert ours.encode(text, add_special_tokens=adds).ids == expected
    assert ours.decode(expected) == theirs.decode(expected)
    assert ours.get_vocab(True) == theirs.get_vocab(True)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_way_to_split_loads_and_loses_nothing(pre: str, tmp_path: Path) -> None:
    ORIGINALS["gpt-2"].steps()
    theirs = trained(ORIGINALS["gpt-2"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    found = written(tmp_path / "x.gguf", lambda writer: add_tokenizer(writer, tmp_path, pre))
    ours = loaded(found.tokenizer_json())
    text = "".join(WORDS) * 2
    text = normalizers.NFC().normalize_str(text) if PRE_TOKENIZERS[pre].nfc else text
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text


@cache
def pieces(name: str, folder: Path) -> sentencepiece.SentencePieceProcessor:
    """Mistral's first vocabulary, or a small one as Gemma's is."""
    if name == "mistral":
        return sentencepiece.SentencePieceProcessor(model_file=str(data_file("tokenizer.model.v1")))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS, *chain(*[WORDS] * 3)]),
        model_prefix=str(folder / "small"),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        hard_vocab_limit=False,
        user_defined_symbols=[*USER_DEFINED, *BLANKS],
        minloglevel=3,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "small.model"))


@cache
def of_pieces(name: str, folder: Path) -> Tokenizer:
    found = pieces(name, folder)

    def kind(number: int) -> gguf.TokenType:
        checks = {
            gguf.TokenType.UNKNOWN: found.is_unknown,
            gguf.TokenType.CONTROL: found.is_control,
            gguf.TokenType.BYTE: found.is_byte,
        }
        usual = gguf.TokenType.NORMAL
        if name == "small" and found.id_to_piece(number) in (*USER_DEFINED, *BLANKS):
            usual = gguf.TokenType.USER_DEFINED
        return next((each for each, check in checks.items() if check(number)), usual)

    def add(writer: gguf.GGUFWriter) -> None:
        numbers = range(found.vocab_size())
        writer.add_tokenizer_model("llama")
        writer.add_token_list([found.id_to_piece(number) for number in numbers])
        writer.add_token_scores([found.get_score(number) for number in numbers])
        writer.add_token_types([kind(number) for number in numbers])
        writer.add_bos_token_id(found.bos_id())
        writer.add_eos_token_id(found.eos_id())
        writer.add_unk_token_id(found.unk_id())
        if name == "small":
            writer.add_add_space_prefix(False)

    return loaded(written(folder / f"{name}.gguf", add).tokenizer_json())


# sentencepiece leaves out a zero byte, and sees no control tokens in texts
SPM_WORDS = st.sampled_from([word for word in WORDS if "<|" not in word and word != "\x00"])
SPM_TEXTS = st.lists(SPM_WORDS | st.sampled_from(CORPUS), max_size=15).map("".join)


@pytest.mark.parametrize("name", ["mistral", "small"])
@settings(max_examples=NUM_CASES)
@given(text=SPM_TEXTS)
@example(text="  two blanks,  and  the end  ")
@example(text="if x:\n    return   y\n       z")
@example(text="日本語 <tool_call>x</tool_call> ▁ \n\n")
def test_texts_have_the_ids_of_sentencepiece(name: str, text: str, folders: Path) -> None:
    theirs, ours = pieces(name, folders), of_pieces(name, folders)
    ids = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False).ids == ids
    assert ours.encode(text).ids == [theirs.bos_id(), *ids]
    assert ours.decode(ids) == theirs.decode(ids)


def small_vocabulary(
    writer: gguf.GGUFWriter, model: str = "gpt2", pre: str = "gpt-2", controls: tuple[str, ...] = ()
) -> None:
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    tokens = {
        "<s>": control, "<|eot_id|>": control, "a": normal, "<|im_end|>": normal,
        "<tool>": gguf.TokenType.USER_DEFINED, "[PAD5]": gguf.TokenType.UNUSED,
        "<reserved>": gguf.TokenType.UNUSED, "</s>": control,
        **dict.fromkeys(controls, control),
    }  # fmt: skip
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(7)


def test_what_ends_an_answer_is_named_or_known_by_its_text(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        small_vocabulary(writer)
        writer.add_eot_token_id(4)

    assert written(tmp_path / "x.gguf", add).generation_config() == {"eos_token_id": [7, 4, 1]}


@pytest.mark.parametrize(
    ("controls", "ends"),
    [
        (
            ("<|end|>", "<|call|>", "<|return|>"),
            [7, 1, 9, 10],
        ),  # gpt-oss ends messages with <|end|>
        (("<|end|>", "<|eot|>"), [7, 1, 8, 9]),
    ],
)
def test_the_end_of_a_message_is_that_of_an_answer_unless_there_are_calls(
    controls: tuple[str, ...], ends: list[int], tmp_path: Path
) -> None:
    found = written(tmp_path / "x.gguf", partial(small_vocabulary, controls=controls))
    assert found.generation_config() == {"eos_token_id": ends}


def test_padding_of_the_embedding_is_no_token(tmp_path: Path) -> None:
    described = written(tmp_path / "x.gguf", small_vocabulary).tokenizer_json()
    tokens = Tokenizer.from_str(json.dumps(described)).get_vocab(True)
    assert "[PAD5]" not in tokens and tokens["<reserved>"] == 6 and tokens["</s>"] == 7
    flags = {token["content"]: token["special"] for token in described["added_tokens"]}
    assert flags == {"<s>": True, "<|eot_id|>": True, "</s>": True, "<tool>": False}


@pytest.mark.parametrize(
    ("adds", "ids"),
    [({}, [0, 2]), ({"bos": False}, [2]), ({"eos": True}, [0, 2, 7]), ({"bos": True}, [0, 2])],
)
def test_tokens_are_put_around_a_text_as_the_file_says(
    adds: dict[str, bool], ids: list[int], tmp_path: Path
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        small_vocabulary(writer, pre="llama-bpe")  # which begins with one unless told otherwise
        for name, value in adds.items():
            getattr(writer, f"add_add_{name}_token")(value)

    described = written(tmp_path / "x.gguf", add).tokenizer_json()
    assert Tokenizer.from_str(json.dumps(described)).encode("a").ids == ids


def test_settings_for_sampling_and_templates_come_along(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        small_vocabulary(writer)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_chat_template(
            [{"name": "default", "template": "usual"}, {"name": "tool_use", "template": "tools"}]
        )

    found = written(tmp_path / "x.gguf", add)
    assert found.generation_config() | {"eos_token_id": []} == {
        "eos_token_id": [], "temperature": 0.5, "top_k": 20,
    }  # fmt: skip
    assert found.chat_templates() == {"": "usual", "tool_use": "tools"}
    assert found.tokenizer_config()["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("model", "pre", "message"),
    [
        ("bert", "gpt-2", "a tokenizer of kind bert is not supported; these are: gpt2"),
        ("gpt2", "superbpe", r"texts are split as superbpe says \(tokenizer.ggml.pre\)"),
        ("llama", "default", "needs a score of each token"),
    ],
)
def test_tokenizers_of_other_kinds_are_refused_by_name(
    model: str, pre: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        written(
            tmp_path / "x.gguf", lambda writer: small_vocabulary(writer, model, pre)
        ).tokenizer_json()
