"""Makes a tokenizer.json of a tiktoken file, which holds each token's bytes and rank.

Kimi K2 and Hunyuan-A13B come with one, and with code that says the rest: how texts are split and
what the special tokens behind the ranks are called. The code is not run.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.byte_level import added_token, model_parts, printable_alphabet
from common.errors import ModelError
from common.pre_tokenizers import PRE_TOKENIZERS

# Kimi's code has two more, for which the model's embedding has no row.
_NUM_RESERVED = 256
_HUNYUAN = ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>")
_NUM_EXTRA = 205


@dataclass(frozen=True, slots=True)
class RankedKind:
    """What a class of tokenizers has beside the ranks.

    `special_tokens` are called so unless tokenizer_config.json says otherwise; it is given the id
    of the first.
    """

    models: str
    file_name: str
    pre_tokenizer: str
    special_tokens: Callable[[int], list[str]]


def _of_kimi(first: int) -> list[str]:
    return [f"<|reserved_token_{token}|>" for token in range(first, first + _NUM_RESERVED)]


def _of_hunyuan(first: int) -> list[str]:
    return [*_HUNYUAN, *(f"<|extra_{number}|>" for number in range(_NUM_EXTRA))]


# By the `tokenizer_class` of tokenizer_config.json.
RANKED_KINDS: Mapping[str, RankedKind] = {
    "TikTokenTokenizer": RankedKind("Kimi K2", "tiktoken.model", "kimi-k2", _of_kimi),
    "HYTokenizer": RankedKind("Hunyuan-A13B", "hy.tiktoken", "hunyuan", _of_hunyuan),
}


def tokenizer_json(kind: RankedKind, file: Path, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what gives the ids that tiktoken gives; ModelError for ranks that make no sense.

    `named` is the `added_tokens_decoder` of tokenizer_config.json.
    """
    ranks = _read_ranks(file)
    letters = {byte: letter for letter, byte in printable_alphabet().items()}

    def written(token: bytes) -> str:
        return token.decode("latin-1").translate(letters)

    pre = PRE_TOKENIZERS[kind.pre_tokenizer]
    added = [
        added_token(token_id, *_name_and_kind(named.get(str(token_id)), name), normalized=pre.nfc)
        for token_id, name in enumerate(kind.special_tokens(len(ranks)), len(ranks))
    ]
    merges = [(written(left), written(right)) for left, right in merges_of(ranks)]
    vocab = {written(token): rank for token, rank in ranks.items()}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **model_parts(pre, vocab, merges),
        "post_processor": None,
    }


def merges_of(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the two parts of each token that merging ends with, in the order of `ranks`.

    tiktoken merges the neighbours that make the token of the lowest rank. As long as it merges
    nothing across the ends of a token, it merges within as in that token alone: so no two other
    parts ever become it. A token that merging does not end with has none.
    """
    none = len(ranks)

    def rank_of(left: bytes, right: bytes) -> int:
        return ranks.get(left + right, none)

    for token in ranks:
        parts = [token[at : at + 1] for at in range(len(token))]
        made = [rank_of(*pair) for pair in pairwise(parts)]
        while len(parts) > 2 and (lowest := min(made)) < none:
            at = made.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
            del made[at]
            if at > 0:
                made[at - 1] = rank_of(parts[at - 1], parts[at])
            if at < len(made):
                made[at] = rank_of(parts[at], parts[at + 1])
        if len(parts) == 2:
            yield parts[0], parts[1]


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Read tokens in the order of their ranks; as in Hunyuan's code, a repeated one counts once."""
    ranks: dict[bytes, int] = {}
    try:
        for line in filter(None, file.read_bytes().splitlines()):
            text, rank = line.split()
            if int(rank) < len(ranks):
                raise ValueError(f"rank {int(rank)} is out of order")
            ranks.setdefault(base64.b64decode(text, validate=True), len(ranks))
        if missing := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
            raise ValueError(f"byte {missing[0]} has no rank")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file} does not hold tiktoken's ranks ({error}); download it again"
        ) from error
    return ranks


def _name_and_kind(entry: Any, name: str) -> tuple[str, bool]:
    """Return what a token is called, and whether texts are shown without it."""
    if not isinstance(entry, dict):
        return name, True
    return str(entry.get("content", name)), bool(entry.get("special", True))
