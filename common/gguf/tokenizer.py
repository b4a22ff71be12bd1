"""The tokenizer files of a GGUF file, as a Hugging Face folder would hold them.

Two kinds are read: byte-level BPE (`gpt2`), and SentencePiece's BPE with scores (`llama`), whose
merges are all pairs of tokens that make a token, in the order of the scores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.byte_level import added_token, model_parts
from common.chat_formats import CALL, END, RETURN
from common.errors import ModelError
from common.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_AT = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_PADDING = re.compile(r"\[PAD\d+\]")
_SPACE = "\u2581"  # SentencePiece's
_TEMPLATE = "tokenizer.chat_template"
# "seperator" is how files spell it.
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}
# End an answer, too, where they are control tokens: files name but one or two of a model's.
_ENDS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>")
    + ("<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|observation|>", "<end_of_utterance>")
    + ("<|eot|>", "<|eom|>", CALL, RETURN)
)
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class GgufTokenizer:
    """The vocabulary in a file's metadata; ModelError for a kind that is not supported."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._kind = self._value("model", "")
        if self._kind not in ("gpt2", "llama"):
            raise ModelError(
                f"{path}: a tokenizer of kind {str(self._kind)[:80] or 'without a name'} is not "
                "supported; these are: gpt2 (byte-level BPE), llama (SentencePiece's BPE)"
            )
        self._pre = PreTokenizer((), adds_bos=True) if self._kind == "llama" else self._pre_named()
        self._tokens: list[str] = self._value("tokens", [])
        types = self._value("token_type", None) or [_NORMAL] * len(self._tokens)
        texts = [token for token in self._tokens if isinstance(token, str)]
        if not texts or not len(texts) == len(self._tokens) == len(types):
            raise ModelError(f"{path} holds no whole vocabulary; convert the model anew")
        self._types: list[int] = types

    def tokenizer_json(self) -> dict[str, Any]:
        parts = self._of_bytes() if self._kind == "gpt2" else self._of_sentence_pieces()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **parts,
            "post_processor": self._post_processor(),
        }

    def tokenizer_config(self) -> dict[str, Any]:
        named = {
            f"{name}_token": self._tokens[token_id]
            for key, name in _NAMED.items()
            if (token_id := self._id(key)) is not None
        }
        return {"tokenizer_class": "PreTrainedTokenizerFast", **named}

    def chat_templates(self) -> dict[str, str]:
        """Return the templates by name; the usual one has none."""
        names = {"": _TEMPLATE} | {
            key.removeprefix(_TEMPLATE + "."): key
            for key in self._metadata
            if key.startswith(_TEMPLATE + ".")
        }
        found = {name: self._metadata.get(key) for name, key in names.items()}
        return {name: text for name, text in found.items() if isinstance(text, str)}

    def generation_config(self) -> dict[str, Any]:
        """Return what ends an answer, and the settings for sampling that the file recommends."""
        named = (self._id(key) for key in ("eos", "eot", "eom"))
        ends = [token_id for token_id in named if token_id is not None]
        known = _ENDS - {END} if CALL in self._tokens else _ENDS  # with calls, it ends a message
        ends += [
            token_id
            for token_id, token in enumerate(self._tokens)
            if token in known and self._types[token_id] == _CONTROL
        ]
        sampling = {
            name: value
            for key, name in _SAMPLING.items()
            if (value := self._metadata.get(f"general.sampling.{key}")) is not None
        }
        return {"eos_token_id": list(dict.fromkeys(ends)), **sampling}

    def _of_bytes(self) -> dict[str, Any]:
        vocab = self._vocab()
        merges = []
        for text in self._value("merges", []):
            left, _, right = text[1:].partition(" ")  # the first may begin with one
            pair = text[:1] + left, right
            if pair[0] in vocab and right in vocab and pair[0] + right in vocab:
                merges.append(pair)
        return model_parts(self._pre, vocab, merges)

    def _of_sentence_pieces(self) -> dict[str, Any]:
        vocab = self._vocab()
        prefixed = self._value("add_space_prefix", True)
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        ]
        back: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefixed:
            steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
            back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._id("unknown")
        return {
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": back},
            "model": {
                "type": "BPE",
                "unk_token": self._tokens[0 if unknown is None else unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": self._merges_by_score(vocab),
            },
        }

    def _merges_by_score(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return all pairs of tokens that make one, as transformers orders them."""
        scores = self._value("scores", [])
        if len(scores) != len(self._tokens):
            raise ModelError(f"{self._path}: a tokenizer of kind llama needs a score of each token")
        mergeable = {
            token
            for token, kind in zip(self._tokens, self._types, strict=True)
            if kind in (_NORMAL, _USER_DEFINED)
        }

        def pairs(token: str) -> Iterator[tuple[str, str]]:
            for cut in range(1, len(token)):
                if token[:cut] in mergeable and token[cut:] in mergeable:
                    yield token[:cut], token[cut:]

        found = [
            (scores[vocab[token]], len(left), len(right), left, right)
            for token in self._tokens
            if len(token) > 1 and token in mergeable
            for left, right in sorted(pairs(token), key=lambda pair: vocab[pair[0]])
        ]
        found.sort(key=lambda merge: merge[:3], reverse=True)
        return [(left, right) for *_, left, right in found]

    def _vocab(self) -> dict[str, int]:
        """Return all tokens but those that only fill up the rows of the embedding."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind != _UNUSED or not _PADDING.fullmatch(token)
        }

    def _added_tokens(self) -> list[dict[str, Any]]:
        return [
            added_token(token_id, self._tokens[token_id], kind != _USER_DEFINED)
            for token_id, kind in enumerate(self._types)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and self._tokens[token_id]
        ]

    def _post_processor(self) -> dict[str, Any] | None:
        adds = {"bos": self._pre.adds_bos, "eos": False}
        ids = {
            name: token_id
            for name, default in adds.items()
            if self._value(f"add_{name}_token", default)
            and (token_id := self._id(name)) is not None
        }
        if not ids:
            return None
        marks = {
            name: {"SpecialToken": {"id": self._tokens[token_id], "type_id": 0}}
            for name, token_id in ids.items()
        }

        def framed(*texts: dict[str, Any]) -> list[dict[str, Any]]:
            begin, end = marks.get("bos"), marks.get("eos")
            return [*([begin] if begin else []), *texts, *([end] if end else [])]

        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        return {
            "type": "TemplateProcessing",
            "single": framed(first),
            "pair": [*framed(first), *framed(second)],
            "special_tokens": {
                token: {"id": token, "ids": [token_id], "tokens": [token]}
                for token_id in ids.values()
                for token in [self._tokens[token_id]]
            },
        }

    def _pre_named(self) -> PreTokenizer:
        name = self._value("pre", "")
        if name not in PRE_TOKENIZERS:
            raise ModelError(
                f"{self._path}: texts are split as {str(name)[:80]} says (tokenizer.ggml.pre), "
                "which is not supported; give the folder of the same model with *.safetensors"
            )
        return PRE_TOKENIZERS[name]

    def _id(self, name: str) -> int | None:
        token_id = self._value(f"{name}_token_id", None)
        whole = isinstance(token_id, int) and 0 <= token_id < len(self._tokens)
        return token_id if whole else None

    def _value(self, key: str, default: Any) -> Any:
        return self._metadata.get(_AT + key, default)
