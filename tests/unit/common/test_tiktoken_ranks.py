"""A tokenizer.json made of tiktoken's ranks gives the ids that tiktoken would give."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.errors import ModelError
from common.text_growth import check_growth
from common.tiktoken_ranks import RANKED_KINDS, tokenizer_json
from tests.cases import num_cases
from tests.ranked_folder import BYTES, HELLO, ranks_text
from tests.unit.detokenizer.vocabularies import tekken_tokens

NUM_CASES = num_cases(150, 5000)
HUNYUAN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = (
    rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"Lu}\p{Lt", "Ll")
)
KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = [
    *"aA1é \n\t.'", "'s", "'LL", "  ", "\r\n", "123456", "héllo", "HTTPServer", "日本語",
    "漢字かな", "한국어", "ไทย", "e\u0301", "\u0338", "🙂", "👨‍👩‍👧", "\u00a0", "\u3000", "\x00",
    "٣", "Ⅻ", "ﬁ",
]  # fmt: skip
POOL = "".join(WORDS).encode()
REAL = list(tekken_tokens()[:30_000])  # the first to be made: a whole vocabulary, too


@dataclass(frozen=True)
class Kind:
    """A class of tokenizers, and what its code says."""

    name: str
    pattern: str
    marks: tuple[str, ...]  # some of its special tokens
    nfc: bool = False


KINDS = [
    Kind("TikTokenTokenizer", KIMI, ("[BOS]", "<|im_end|>")),
    Kind("HYTokenizer", HUNYUAN, ("<|startoftext|>", "<|extra_7|>"), nfc=True),
]
BY_NAME = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
NAMED = {"1": {"content": "<|im_end|>", "special": False}, "0": {"content": "[BOS]"}}

# Parts of texts, which may begin and end within a character, and what merges in many ways.
CUTS = st.tuples(st.integers(0, len(POOL) - 2), st.integers(2, 9))
PARTS = CUTS.map(lambda cut: POOL[cut[0] : sum(cut)]) | st.lists(
    st.sampled_from([b"a", b"A", b" ", b"\xe6", b"\n"]), min_size=2, max_size=6
).map(b"".join)
RANKS = st.lists(PARTS, max_size=60).map(lambda parts: list(dict.fromkeys([*BYTES, *parts])))
TEXTS = st.lists(
    st.sampled_from(WORDS) | st.sampled_from(range(2)) | st.text(max_size=4), max_size=20
)


def made(folder: Path, kind: str, tokens: list[bytes], named: Mapping[str, Any]) -> Tokenizer:
    """Load what is made of ranks; names are by the number of a special token."""
    file = folder / "ranks"
    file.write_bytes(ranks_text(tokens))
    entries = {str(len(tokens) + int(number)): entry for number, entry in named.items()}
    described = tokenizer_json(RANKED_KINDS[kind], file, entries)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    check_growth(tokenizer)
    return tokenizer


def of_kind(folder: Path, kind: Kind, tokens: list[bytes]) -> Tokenizer:
    return made(folder, kind.name, tokens, {} if kind.nfc else NAMED)


def merged(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Merge as tiktoken does: the whole, or the neighbours of the lowest rank till none is left."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[at : at + 1] for at in range(len(piece))]
    while True:
        found = [
            (ranks[both], at)
            for at in range(len(parts) - 1)
            if (both := parts[at] + parts[at + 1]) in ranks
        ]
        if not found:
            return [ranks[part] for part in parts]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def expected(kind: Kind, tokens: list[bytes], text: str, special: Mapping[str, int]) -> list[int]:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    text = unicodedata.normalize("NFC", text) if kind.nfc else text
    ids = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            ids.append(special[part])
            continue
        for piece in regex.findall(kind.pattern, part, regex.V1):
            ids += merged(piece.encode(), ranks)
    return ids


@BY_NAME
@settings(max_examples=NUM_CASES)
@given(tokens=RANKS, words=TEXTS)
@example(tokens=[*BYTES, b"aaa", b"aa"], words=["aaaaa aaaa aaa"])
@example(tokens=[*BYTES, b"abc", b"ab", b"bc"], words=["abcabc"])
@example(tokens=[*BYTES, b"abcd"], words=["abcd"])  # a whole word, and nothing that merges
@example(tokens=HELLO, words=["hello", 0, "hellohello", 1, "\u0338"])
def test_texts_have_the_ids_that_tiktoken_gives(
    kind: Kind, tokens: list[bytes], words: list[str | int], tmp_path: Path
) -> None:
    text = "".join(kind.marks[word] if isinstance(word, int) else word for word in words)
    ours = of_kind(tmp_path, kind, tokens)
    special = {
        token.content: token_id for token_id, token in ours.get_added_tokens_decoder().items()
    }
    ids = expected(kind, tokens, text, special)
    assert ours.encode(text).ids == ids
    whole = unicodedata.normalize("NFC", text) if kind.nfc else text
    assert ours.decode(ids, skip_special_tokens=False) == whole


@cache
def of_real_ranks(kind: Kind, folder: Path) -> Tokenizer:
    return of_kind(folder, kind, REAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@BY_NAME
@settings(max_examples=NUM_CASES)
@given(words=TEXTS)
@example(words=["The HTTPServer isn't  at 12345678,\r\n\r\n   但漢字かな交じり文は한국어 🙂!"])
def test_real_ranks_give_the_same_ids(kind: Kind, words: list[str | int], folder: Path) -> None:
    text = "".join(map(str, words))
    ours = of_real_ranks(kind, folder)
    special = {
        token.content: token_id for token_id, token in ours.get_added_tokens_decoder().items()
    }
    assert ours.encode(text).ids == expected(kind, REAL, text, special)


@settings(max_examples=NUM_CASES)
@given(data=st.data(), tokens=RANKS)
def test_tokens_that_are_no_whole_characters_decode_as_their_bytes(
    data: st.DataObject, tokens: list[bytes], tmp_path: Path
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=12))
    ours = of_kind(tmp_path, KINDS[0], tokens)
    assert ours.decode(ids) == b"".join(tokens[each] for each in ids).decode("utf-8", "replace")


def test_special_tokens_of_kimi_have_their_names_and_fill_a_block_of_256(tmp_path: Path) -> None:
    added = made(tmp_path, "TikTokenTokenizer", HELLO, NAMED).get_added_tokens_decoder()
    first = len(HELLO)
    assert list(added) == [*range(first, first + 256)]
    assert [added[first + at].content for at in range(3)] == [
        "[BOS]",
        "<|im_end|>",
        f"<|reserved_token_{first + 2}|>",
    ]
    assert [added[first + at].special for at in range(3)] == [True, False, True]


def test_special_tokens_of_hunyuan_have_the_names_of_its_code(tmp_path: Path) -> None:
    ours = made(tmp_path, "HYTokenizer", HELLO, {})
    names = ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", "<|extra_0|>"]
    first = len(HELLO)
    assert [ours.token_to_id(name) for name in names] == [*range(first, first + 6)]
    assert ours.get_vocab_size() == first + 210 == ours.token_to_id("<|extra_204|>") + 1


def test_a_token_that_is_repeated_counts_once(tmp_path: Path) -> None:
    ours = made(tmp_path, "HYTokenizer", [*HELLO[:257], HELLO[256], *HELLO[257:]], {})
    assert ours.encode("hello").ids == [len(HELLO) - 1]
    assert ours.token_to_id("<|endoftext|>") == len(HELLO)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "byte 0 has no rank"),
        (ranks_text(BYTES[:-1]), "byte 255 has no rank"),
        (ranks_text(HELLO) + b"YWI= 5\n", "rank 5 is out of order"),
        (ranks_text(HELLO) + b"YWI=\n", "not enough values"),
        (ranks_text(HELLO) + b"YWI 260\n", "padding"),
        (ranks_text(HELLO) + b"YWI= x\n", "invalid literal"),
    ],
)
def test_broken_ranks_are_refused_with_their_file(
    content: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "tiktoken.model"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=f"{file} does not hold .*{said}.*; download it again"):
        tokenizer_json(RANKED_KINDS["TikTokenTokenizer"], file, {})
