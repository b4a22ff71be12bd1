"""How much longer a tokenizer.json makes a text before it is encoded, or what it decodes.

Forty normalizers that replace `a` by `aa` make a text of one letter a terabyte. Nothing interrupts
them, so such a tokenizer is refused when it is loaded.
"""

from __future__ import annotations

import base64
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from common.errors import ModelError

MAX_GROWTH = 16  # real ones replace a tab by eight blanks, or a blank by three bytes
MAX_PREPENDED = 4096
# What these make of a character at most. Of each kind the first is not counted: every other
# tokenizer has one, the characters that grow are rare, and only a chain can explode.
_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12}
_UNICODE |= {"ByteLevel": 4, "Precompiled": 18, "StripAccents": 1, "Nmt": 1}
_ASSERTION = re.compile(r"\(\?<?[=!]|\\[bBAGZzyYK]|[$^]")
_PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def check_growth(tokenizer: Tokenizer) -> None:
    """Raise ModelError if a step of the tokenizer can make a text too much longer."""
    steps = {name: list(_steps(getattr(tokenizer, name), part)) for name, part in _PARTS.items()}
    before = [*steps["normalizer"], *steps["pre_tokenizer"]]
    for name, chain in (("normalizer and pre_tokenizer", before), ("decoder", steps["decoder"])):
        growth = growth_of(chain)
        if growth > MAX_GROWTH:
            raise ModelError(
                f"its {name} can make a text {_shown(growth)} times as long; at most "
                f"{MAX_GROWTH} times is served"
            )


def growth_of(steps: list[Mapping[str, Any]]) -> int:
    """Bound how many characters one becomes, by the steps of tokenizer.json in their order."""
    sizes: dict[str, int] = {}  # what a character becomes in the steps from here on
    other = 1  # any that `sizes` does not name
    prepended = 0
    seen: Counter[str] = Counter()
    for step in reversed(steps):
        kind = str(step.get("type"))
        if kind == "Replace":
            size = _size(str(step["content"]), sizes, other)
            pattern = step["pattern"]
            if "String" in pattern:
                text = str(pattern["String"]) or "\0"
                share = -(-size // len(text))
                sizes |= {letter: max(sizes.get(letter, other), share) for letter in text}
            else:  # it may match anything, and between all letters if it matches nothing
                fixed = 0 if _matches_a_letter(str(pattern["Regex"])) else 1
                sizes = {key: max(value, size + fixed * value) for key, value in sizes.items()}
                other = max(other, size + fixed * other)
        elif kind == "Prepend":
            prepended += _size(str(step["prepend"]), sizes, other)
        elif kind in _UNICODE:  # any character may become any other
            other = max(other, *sizes.values(), 0) * (_UNICODE[kind] if seen[kind] else 1)
            other *= max(1, _longest(step) // _UNICODE[kind])
            sizes = {}
            seen[kind] += 1
        if max(other, *sizes.values(), 0) > 1 << 60 or prepended > MAX_PREPENDED:
            return 1 << 60  # enough is known
    return max(other, *sizes.values(), 0)


def _size(text: str, sizes: Mapping[str, int], other: int) -> int:
    return sum(sizes.get(letter, other) for letter in text)


def _steps(part: Any, children: str) -> Iterator[Mapping[str, Any]]:
    """Return the steps of a part of a tokenizer, sequences within sequences laid out."""
    return _flat(json.loads(part.__getstate__()), children) if part is not None else iter(())


def _flat(step: Mapping[str, Any], children: str) -> Iterator[Mapping[str, Any]]:
    if step.get("type") != "Sequence":
        yield step
        return
    for child in step[children]:
        yield from _flat(child, children)


def _matches_a_letter(pattern: str) -> bool:
    """Whether no match of a regular expression is empty; False also if that is unknown.

    Without assertions what matches between two letters also matches in an empty text.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what Python reads otherwise than Oniguruma
        try:
            parsed = re.compile(re.sub(r"\\[pP]\{[^}]*\}", r"\\w", pattern))
        except (re.error, Warning, OverflowError, RecursionError):
            return False
    return not _ASSERTION.search(pattern) and not parsed.search("")


def _longest(step: Mapping[str, Any]) -> int:
    """Return the length of the longest replacement in a SentencePiece table."""
    table = base64.b64decode(step.get("precompiled_charsmap") or "")
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(len(text.decode(errors="replace")) for text in texts)


def _shown(growth: int) -> str:
    return str(growth) if growth < 1 << 60 else "more than 10^18"
