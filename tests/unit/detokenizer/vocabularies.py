"""Real vocabularies for decoding: a byte-level one of 130,000 tokens and a byte-fallback one.

They come as data files of the `mistral-common` distribution, which is installed without its
dependencies and never imported.
"""

from __future__ import annotations

import json
from binascii import a2b_base64
from collections.abc import Callable
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from common.byte_level import printable_alphabet
from common.chat_formats import REASONING_FORMATS, TOOL_FORMATS
from services.detokenizer.vocabulary import TokenVocabulary

DATA = "mistral_common/data"
NUM_SPECIAL = 1000  # of Tekken's tokens
MARKERS = tuple(
    dict.fromkeys(
        [marker for markers in TOOL_FORMATS.values() for marker in markers.all]
        + [marker for each in REASONING_FORMATS.values() for marker in each.all]
    )
)


def data_file(name: str) -> Path:
    """Return the path of one of the distribution's data files."""
    return Path(str(distribution("mistral-common").locate_file(f"{DATA}/{name}")))


@cache
def tekken_tokens() -> tuple[bytes, ...]:
    """Tekken's 130,072 byte strings, in the order of their ranks."""
    data = json.loads(data_file("tekken_240718.json").read_text())
    size = data["config"]["default_vocab_size"] - NUM_SPECIAL
    return tuple(a2b_base64(entry["token_bytes"]) for entry in data["vocab"][:size])


@cache
def tekken() -> Tokenizer:
    """Byte-level: Tekken, 1,000 special tokens and its byte strings."""
    letters = {byte: character for character, byte in printable_alphabet().items()}
    tokens = {f"<special_{i}>": i for i in range(NUM_SPECIAL)}
    for rank, raw in enumerate(tekken_tokens()):
        tokens[raw.decode("latin-1").translate(letters)] = NUM_SPECIAL + rank
    tokenizer = Tokenizer(BPE(tokens, []))
    tokenizer.add_special_tokens([f"<special_{i}>" for i in range(NUM_SPECIAL)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def marked() -> Tokenizer:
    """Byte-level: the 256 bytes, and special tokens of which some are markers of chat formats."""
    letters = list(printable_alphabet())
    tokenizer = Tokenizer(BPE({letter: token_id for token_id, letter in enumerate(letters)}, []))
    tokenizer.add_special_tokens([*MARKERS, "<|end|>", "<|hidden|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def mistral_v1() -> Tokenizer:
    """Byte-fallback: the 32,000 pieces of Mistral's first SentencePiece model."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data_file("tokenizer.model.v1")))
    tokens = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    tokenizer = Tokenizer(BPE(tokens, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@cache
def vocabulary_of(make: Callable[[], Tokenizer]) -> TokenVocabulary:
    """Return one that all tests read; of 130,000 tokens it takes a third of a second to make."""
    return TokenVocabulary(make())
