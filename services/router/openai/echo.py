"""Prompts that come back before the answer, and where logprobs are wanted token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.messages.arrays import int32s
from common.messages.text import Candidate
from common.messages.tokenize import IdsPrompt, PromptSource, TextPrompt
from services.router.dispatch import Dispatch
from services.router.fleet import Group
from services.router.generate_request import GenerateRequest


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text; `first` is its first token, which no logprob is known of."""

    text: str
    first: Candidate | None = None


async def echoed(
    dispatch: Dispatch, group: Group, job: GenerateRequest, goes_on: bool
) -> tuple[GenerateRequest, list[Echo]]:
    """Find what the prompts of a completion look like; ApiError where nobody can say.

    Prompts that are cut, or that are shown token by token, are tokenized here, so that the job that
    is returned asks for just what is echoed. Where an answer `goes_on` behind them, prompts end
    before a character that they leave unfinished: the answer has all of it, or it is none.
    """
    by_token = job.sampling.num_logprobs >= 0
    echoes: list[Echo] = []
    prompts: list[PromptSource] = []
    firsts: dict[int, str] = {}
    kept = job.num_kept_tokens(group.card)
    for number, prompt in enumerate(job.prompts):
        field = job.field_of(number)
        text = prompt.text if isinstance(prompt, TextPrompt) else None
        if isinstance(prompt, TextPrompt) and (by_token or kept):
            answer = await dispatch.tokenize(group, prompt, field, False)
            prompt = IdsPrompt(answer.ids)
        if isinstance(prompt, IdsPrompt):
            ids = prompt.ids
            if 0 < kept < len(ids):
                ids = ids[-kept:] if job.truncate_side == "left" else ids[:kept]
                prompt, text = IdsPrompt(ids), None
            if text is None:
                text = await dispatch.detokenize(group, prompt, field, goes_on)
            if by_token and len(ids) and ids[0] not in firsts:
                alone = IdsPrompt(int32s(ids[:1]))
                firsts[ids[0]] = await dispatch.detokenize(group, alone, field)
        assert text is not None  # a chat has no echo
        prompts.append(prompt)
        first = None
        if by_token and isinstance(prompt, IdsPrompt) and len(prompt.ids):
            first = _first(prompt.ids[0], firsts[prompt.ids[0]], text)
        echoes.append(Echo(text, first))
    return replace(job, prompts=tuple(prompts), truncate_to=0), echoes


def _first(token_id: int, name: str, text: str) -> Candidate:
    """Describe a first token; one that the tokenizer put before a text has no place in it."""
    data = name.encode() if text.startswith(name) else b""
    return Candidate(token_id, name, data, 0.0)
