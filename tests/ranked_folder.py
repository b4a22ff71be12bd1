"""Folders of models that have a tiktoken file in place of a tokenizer.json."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BYTES = [bytes([byte]) for byte in range(256)]
HELLO = [*BYTES, b"he", b"ll", b"hell", b"hello"]
FILE_NAMES = {"TikTokenTokenizer": "tiktoken.model", "HYTokenizer": "hy.tiktoken"}


def ranks_text(tokens: Iterable[bytes]) -> bytes:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    return b"".join(lines)


def write_ranked(
    folder: Path, tokens: Iterable[bytes] = HELLO, kind: str = "TikTokenTokenizer", **config: Any
) -> Path:
    """Write both files of the tokenizer; `config` goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE_NAMES[kind]).write_bytes(ranks_text(tokens))
    text = json.dumps({"tokenizer_class": kind, **config})
    (folder / "tokenizer_config.json").write_text(text)
    return folder
