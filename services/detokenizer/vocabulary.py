"""A model folder's vocabulary, seen from the ids: the decoding it needs, and names of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.chat_formats import special_ids
from common.tokenizer_folder import load_tokenizer, read_folder
from services.detokenizer.decoding import (
    ByteFallbackDecoding,
    ByteLevelDecoding,
    Decoding,
    WindowDecoding,
)


class TokenVocabulary:
    """The tokenizer of one model, for turning ids into text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._markers: dict[tuple[str, ...], frozenset[int]] = {}
        self._added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(
            token_id for token_id, token in self._added.items() if token.special
        )
        self.decoding = choose_decoding(tokenizer, self.special_ids)

    @classmethod
    def load(cls, folder: Path) -> TokenVocabulary:
        """Read a model folder's tokenizer; ModelError when it is missing or not one."""
        return cls(load_tokenizer(read_folder(folder)))

    def markers(self, words: tuple[str, ...]) -> frozenset[int]:
        """Return the ids of those words that are special tokens."""
        ids = self._markers.get(words)
        if ids is None:
            ids = self._markers[words] = frozenset(special_ids(words, self._added).values())
        return ids


def choose_decoding(tokenizer: Tokenizer, special: frozenset[int]) -> Decoding:
    """Pick the fastest decoding that is exact for this tokenizer's decoder."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(True).items()}
    steps = _steps(decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelDecoding(tokens, special)
    fallback = _byte_fallback(steps)
    if fallback is not None:
        replacements, stripped, has_byte_tokens = fallback
        return ByteFallbackDecoding(tokens, special, replacements, stripped, has_byte_tokens)
    return WindowDecoding(tokenizer, special)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _byte_fallback(
    steps: list[dict[str, Any]],
) -> tuple[tuple[tuple[str, str], ...], int, bool] | None:
    """Read Replace*, ByteFallback?, Fuse, Strip? as (replacements, stripped, has byte tokens)."""
    rest = list(steps)
    replacements = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    has_byte_tokens = bool(rest) and rest[0]["type"] == "ByteFallback"
    if has_byte_tokens:
        rest.pop(0)
    if not rest or rest.pop(0)["type"] != "Fuse":
        return None
    stripped = 0
    if rest and rest[0]["type"] == "Strip" and rest[0]["content"] == " " and not rest[0]["stop"]:
        stripped = rest.pop(0)["start"]
    return (tuple(replacements), stripped, has_byte_tokens) if not rest else None
