"""How the next token is chosen: what sampling on the device needs, and what a grammar allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Rules for every token of one answer; a token must satisfy all of them.

    `grammar` is a grammar as llguidance takes it: Lark text, or its JSON form beginning with `{`;
    empty for none. `allowed_token_ids` are the only ones allowed, if there are any; what ends a
    text stays allowed. No answer contains one of `banned_sequences`. `field` is the request field
    that a grammar came from, which a refusal names.
    """

    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    field: str = "response_format"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling settings, already validated and resolved by the router.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 are off.
    num_logprobs and num_prompt_logprobs: -1 none, 0 the token's own, k also the k most likely.
    max_tokens 0 in a `Tokenize` means "as much as fits"; in a `Generate` it is resolved.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    grammar_spec: GrammarSpec | None = None
