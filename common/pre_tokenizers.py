"""How texts are split before merging, by the names that `tokenizer.ggml.pre` of GGUF files has.

llama.cpp finds the names by what a tokenizer makes of a test text. The expressions are those of the
models' own tokenizers as far as they are known, else llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(upper: str, lower: str) -> tuple[str, str]:
    """Words whose first letters are upper case, and words that may have nothing else."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    return f"{begin}{upper}*{lower}+", f"{begin}{upper}+{lower}*"


_CASED = _cased(_UPPER, _LOWER)
_CASED_NO_HAN = _cased(*(rf"{letters[:-1]}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER)))
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_PATHS}|{_SPACES}"
_GPT4O = rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|" + _SPACES,
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# Cased letters, but for some alphabets that the model's list leaves out.
_LISTED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8f}"
    r"\x{2d00}-\x{2d2d}\x{a790}-\x{a7ff}\x{ab30}-\x{ab6f}\x{10500}-\x{105ff}"
    r"\x{10d00}-\x{10dff}\x{16e00}-\x{1dfff}]]"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?{_LISTED}+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_KIMI = (
    rf"\p{{Han}}+|{_CASED_NO_HAN[0]}{_ENDINGS}?|{_CASED_NO_HAN[1]}{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
)
_SEED = rf"{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Expressions that are applied one after the other, and what goes with them.

    `whole_words`: a piece that is a token is one, whatever the merges say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False  # unless the file says it


_GPT2_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_WORDS = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "": PreTokenizer(_DEFAULT),
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3_WORDS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    "glm4": PreTokenizer((_LLAMA3,), whole_words=True),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), PreTokenizer((_QWEN2,))),
    "hunyuan": PreTokenizer((_QWEN2,), nfc=True, whole_words=True),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **dict.fromkeys(("starcoder", "smollm", "refact", "exaone", "minerva-7b"), _GPT2_DIGITS),
    "command-r": PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    **dict.fromkeys(("gpt-2", "olmo", "exaone4", "gigachat"), PreTokenizer((_GPT2,))),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer((_GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "kimi-k2": PreTokenizer((_KIMI,), whole_words=True),
    "seed-coder": PreTokenizer((_SEED,)),
}
