"""Walks through grammars: tokens drawn from the masks until the text may end, as sampling does."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from common.chat_formats import TOOL_FORMATS
from common.messages.sampling import GrammarSpec
from services.tokenizer.lark import Vocabulary
from tests.unit.tokenizer.vocabularies import byte_level

EOS = "</s>"
# Special in the vocabularies of the models that have them.
SPECIAL_MARKERS = (
    *TOOL_FORMATS["harmony"].all,
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "<|python_tag|>",
)
WHOLE_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # one token, but text
DEEPSEEK_MARKERS = TOOL_FORMATS["deepseek"].all
KIMI_MARKERS = TOOL_FORMATS["kimi_k2"].all
XML_MARKERS = (
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
)
# What a walk that has to come to its end would rather write, best first.
_CLOSING = ("</think>", "</arg_value>", '"', "}", "]", ")", "`", "\n", ",", "0", "1")


class Model:
    """A tokenizer with what llguidance and we make of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self.eos = tokenizer.token_to_id(EOS)
        self._tag = self.ids("\n</parameter>")
        self._matching = LLTokenizer(tokenizer.to_str(), eos_token=self.eos)

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._matching, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def takes(self, grammar_spec: GrammarSpec | None, text: str) -> bool:
        """Whether the grammar lets a model write this and end."""
        assert grammar_spec is not None
        return self.takes_ids(grammar_spec, self.ids(text))

    def takes_ids(self, grammar_spec: GrammarSpec, ids: list[int]) -> bool:
        matcher = self.matcher(grammar_spec.grammar)
        for token_id in ids:
            if not self._allowed(matcher)[token_id]:
                return False
            assert matcher.consume_token(token_id), matcher.get_error()
        return bool(matcher.is_accepting()) and self._allowed(matcher)[self.eos]

    def walk(
        self, grammar_spec: GrammarSpec, random: Random, num_free: int, begun: str = ""
    ) -> str | None:
        """Draw tokens, after `num_free` of them such that it ends; None if that takes too long.

        The walk goes on from what is `begun`.
        """
        matcher = self.matcher(grammar_spec.grammar)
        ids = self.ids(begun)
        assert matcher.consume_tokens(ids)
        for number in range(600):
            allowed = [at for at, may in enumerate(self._allowed(matcher)) if may]
            assert allowed, "a dead end"
            token_id = random.choice(allowed)
            if self.eos in allowed and (number >= num_free or token_id == self.eos):
                return self.text(ids)
            if number >= num_free and random.random() < 0.9:
                token_id = next(
                    (at for at in map(self.tokenizer.token_to_id, _CLOSING) if at in allowed),
                    token_id,
                )
            elif token_id == self.eos:
                continue
            written = [token_id]
            if number >= num_free and matcher.validate_tokens(self._tag) == len(self._tag):
                written = self._tag  # which no single token is
            ids += written
            assert matcher.consume_tokens(written), matcher.get_error()
        return None

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _allowed(self, matcher: LLMatcher) -> list[bool]:
        mask = matcher.compute_bitmask()
        return [bool(mask[at >> 3] >> (at & 7) & 1) for at in range(self.vocabulary.size)]


@cache
def model(kind: str = "tokens") -> Model:
    """A small byte-level model: its markers are `tokens`, or `text` that takes several."""
    tokenizer = byte_level()
    if kind == "tokens":
        tokenizer.add_tokens([AddedToken(text, special=True) for text in SPECIAL_MARKERS])
        whole = (*WHOLE_MARKERS, *DEEPSEEK_MARKERS, *XML_MARKERS, *KIMI_MARKERS)
        tokenizer.add_tokens([AddedToken(text, special=False) for text in whole])
    return Model(tokenizer)


def tool(name: str, parameters: Any = None, strict: bool = False) -> dict[str, Any]:
    """A function tool as clients send it."""
    function: dict[str, Any] = {"name": name}
    if parameters is not None:
        function["parameters"] = parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def compact(value: Any) -> str:
    """JSON as models usually write it."""
    return json.dumps(value, ensure_ascii=False)
