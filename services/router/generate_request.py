"""One client request, validated and resolved: all that the ring has to know, nothing of HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from common.messages.sampling import SamplingParams
from common.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    OutputRules,
    PromptSource,
    StreamSettings,
)

MAX_PROMPTS = 1024
MAX_ALL_CHOICES = 1024  # prompts x n of one call
TRUNCATE_TO_FIT = -1


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to generate: every prompt, `num_choices` times over.

    `prompt_field` is the request field the prompts came from, `max_tokens_field` the name under
    which the client gave its limit. A `sampling.seed` counts only where
    `has_seed`; else each prompt is given one at admission. `unset` names the sampling settings
    that the client left to the model. Where the client gave no limit (`sampling.max_tokens` 0),
    `usual_max_tokens` is generated, or what fits if that is less; 0 is all that fits. Of a job
    that is `prompt_only` nothing is generated: it never goes round the ring.

    `rules` are what the answers' tokens must obey. A prompt of more than `truncate_to` tokens is
    cut at its `truncate_side`: 0 is never, `TRUNCATE_TO_FIT` at as many as the model takes. With
    `pooling` the answer is the prompt's embedding. Of a job that is one of several of a request,
    `first_prompt` is the number of its first prompt there.
    """

    model: str
    prompts: tuple[PromptSource, ...]
    prompt_field: str
    sampling: SamplingParams
    has_seed: bool
    stream: StreamSettings
    num_choices: int = 1
    priority: int = 0
    cache_salt: str = ""
    max_tokens_field: str = "max_tokens"
    unset: frozenset[str] = frozenset()
    usual_max_tokens: int = 0
    prompt_only: bool = False
    rules: OutputRules = OutputRules()
    truncate_to: int = 0
    truncate_side: Literal["left", "right"] = "left"
    pooling: bool = False
    first_prompt: int = 0

    @property
    def num_all_choices(self) -> int:
        """Choices in the response: those of prompt p are p * num_choices and following."""
        return len(self.prompts) * self.num_choices

    def with_defaults(self, defaults: Iterable[tuple[str, float]]) -> GenerateRequest:
        """Fill in what the client left out with the model's own settings, by their names."""
        values: dict[str, Any] = {name: value for name, value in defaults if name in self.unset}
        if not values:
            return self
        if "top_k" in values:
            values["top_k"] = max(0, int(values["top_k"]))  # -1 is another name for "off"
        return replace(self, sampling=replace(self.sampling, **values))

    def field_of(self, prompt: int) -> str:
        """Name the request field of one prompt."""
        if len(self.prompts) == 1 and not self.first_prompt:
            return self.prompt_field
        return f"{self.prompt_field}[{self.first_prompt + prompt}]"

    def in_parts(self, most_prompts: int) -> Iterator[GenerateRequest]:
        """Cut a job of many prompts into several."""
        for first in range(0, len(self.prompts), most_prompts):
            prompts = self.prompts[first : first + most_prompts]
            yield replace(self, prompts=prompts, first_prompt=first)

    def cost_tokens(self, max_model_len: int) -> int:
        """Estimate the tokens that this job may occupy, without tokenizing: 4 bytes a token."""
        prompt = sum(_estimated_tokens(source) for source in self.prompts)
        if self.prompt_only or self.pooling:
            return prompt
        output = self.sampling.max_tokens or self.usual_max_tokens or max_model_len
        return prompt + self.num_all_choices * min(output, max_model_len or output)

    def most_prompt_tokens(self, max_model_len: int) -> int:
        """Bound the tokens of all prompts, at a character each (0: the model sets no limit)."""
        return sum(min(_most_tokens(source), max_model_len or 1 << 31) for source in self.prompts)


def _most_tokens(source: PromptSource) -> int:
    if isinstance(source, IdsPrompt):
        return len(source.ids)
    return 4 * _estimated_tokens(source) + 4


def _estimated_tokens(source: PromptSource) -> int:
    if isinstance(source, IdsPrompt):
        return len(source.ids)
    if isinstance(source, ChatPrompt):
        size = len(source.messages_json) + len(source.tools_json) + len(source.template_kwargs_json)
        return size // 4
    return len(source.text) // 4
