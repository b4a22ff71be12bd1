"""Byte-level BPE, whose tokens are bytes that are written as GPT-2 writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.pre_tokenizers import PreTokenizer


def printable_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: the character that stands for each of the 256 bytes.

    Printable Latin-1 characters stand for themselves, the other bytes for characters from
    U+0100 upwards, in order.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in own}
    others = (byte for byte in range(256) if byte not in set(own))
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


def model_parts(
    pre: PreTokenizer, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return what tokenizer.json says of the model and of the steps around it."""
    split = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in pre.patterns
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    to_bytes["use_regex"] = False
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, to_bytes]},
        "decoder": {**to_bytes, "use_regex": True},
        "model": {
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole_words,
            "vocab": vocab,
            "merges": merges,
        },
    }


def added_token(
    token_id: int, text: str, is_special: bool, normalized: bool = False
) -> dict[str, Any]:
    """Return what tokenizer.json says of a token that stands for a text.

    `normalized`: it is looked for behind the normalizer.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    flags |= {"normalized": normalized, "special": is_special}
    return {"id": token_id, "content": text, **flags}
