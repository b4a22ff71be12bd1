"""A tokenizer's steps that make texts explode are found before any text meets them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from common.errors import ModelError
from common.text_growth import MAX_GROWTH, check_growth
from common.tokenizer_folder import load_tokenizer, read_folder
from tests.unit.tokenizer.vocabularies import KINDS, byte_level, write_folder

DOUBLES = normalizers.Replace("a", "aa")
HARMLESS = [
    normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase(), normalizers.StripAccents()]),
    normalizers.Sequence([normalizers.Replace(letter, "<tab>") for letter in "\t\n\r\v\f"]),
    normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), "\u2581")] * 40),
    normalizers.Sequence([normalizers.Replace(Regex(r"^ |\s+$"), "")] * 40),
    normalizers.Sequence([normalizers.Replace("a", "b"), normalizers.Replace("b", "a")] * 40),
    normalizers.BertNormalizer(),
    normalizers.Sequence([normalizers.NFC(), normalizers.ByteLevel()]),
]
EXPLODING = [
    [DOUBLES] * 40,
    [normalizers.Replace("a", "a" * 17)],
    [normalizers.Replace("ab", "abab")] * 5,
    [normalizers.Replace("a", "bb"), normalizers.Lowercase(), normalizers.Replace("b", "aa")] * 3,
    [normalizers.Replace("A", "aa"), normalizers.Replace(Regex("a"), "AA")] * 3,
    [normalizers.Replace(Regex("(?<=a)"), "a")] * 5,
    [normalizers.Replace(Regex("x*"), "a")] * 5,
    [normalizers.Replace(Regex(r"[[:alpha:]&&[^b]]"), "aa")] * 5,
    [normalizers.Sequence([DOUBLES, DOUBLES, DOUBLES]), normalizers.Sequence([DOUBLES, DOUBLES])],
    [normalizers.ByteLevel()] * 4,
    [normalizers.Prepend("a" * 5000)],
]


def tokenizer() -> Tokenizer:
    return Tokenizer(models.BPE())


@pytest.mark.parametrize("normalizer", HARMLESS, ids=str)
def test_what_models_have_is_loaded(normalizer: normalizers.Normalizer) -> None:
    loaded = tokenizer()
    loaded.normalizer = normalizer
    check_growth(loaded)


@pytest.mark.parametrize("kind", KINDS)
def test_so_is_every_kind_of_tokenizer(kind: str, tmp_path: Path) -> None:
    load_tokenizer(read_folder(write_folder(tmp_path, KINDS[kind]())))


@pytest.mark.parametrize("chain", EXPLODING, ids=str)
def test_what_explodes_is_refused(chain: list[normalizers.Normalizer]) -> None:
    loaded = tokenizer()
    loaded.normalizer = normalizers.Sequence(chain)
    with pytest.raises(ModelError, match=f"its normalizer .* at most {MAX_GROWTH} times"):
        check_growth(loaded)


def test_pre_tokenizers_and_decoders_are_looked_at_too() -> None:
    loaded = tokenizer()
    loaded.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 4)
    with pytest.raises(ModelError, match="its normalizer and pre_tokenizer"):
        check_growth(loaded)
    loaded = tokenizer()
    loaded.decoder = decoders.Sequence([decoders.Replace("a", "aa")] * 40)
    with pytest.raises(ModelError, match="its decoder can make a text 1099511627776 times"):
        check_growth(loaded)


def test_a_folder_with_such_a_file_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.normalizer = normalizers.Sequence([DOUBLES] * 40)
    loaded.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"tokenizer\.json: its normalizer"):
        load_tokenizer(read_folder(folder))


REPLACES = st.builds(normalizers.Replace, st.text("abc", min_size=1, max_size=2), st.text("abc"))


@given(chain=st.lists(REPLACES, max_size=4), text=st.text("abcd", max_size=20))
def test_no_text_grows_beyond_the_bound(chain: list[normalizers.Normalizer], text: str) -> None:
    loaded = tokenizer()
    loaded.normalizer = normalizers.Sequence(chain)
    try:
        check_growth(loaded)
    except ModelError:
        return
    assert len(loaded.normalizer.normalize_str(text)) <= MAX_GROWTH * len(text)
