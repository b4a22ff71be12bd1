"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from common.messages.arrays import int32s
from common.messages.failure import Ending, Usage
from common.messages.text import Candidate
from common.messages.tokenize import IdsPrompt, PromptSource, TextPrompt
from common.telemetry import names
from services.router.admission import Client
from services.router.answer import CompleteAnswer
from services.router.dispatch import Dispatch
from services.router.endpoint import Call, Endpoint, generation, json_response, prepare
from services.router.fleet import Group
from services.router.generate_request import GenerateRequest
from services.router.generation import STREAM_HEADERS, RequestContext, response_head
from services.router.middleware import CLIENT, WARNINGS
from services.router.openai.chat import ChatRequest, parse_chat
from services.router.openai.chat_format import ChatFormat
from services.router.openai.completion_format import CompletionFormat, Echo
from services.router.openai.completions import CompletionRequest, parse_completion
from services.router.sse import AnswerFormat


async def _complete(call: Call[CompletionRequest]) -> web.StreamResponse:
    """Continue the prompts; those that come back, and alone, do not go round the ring."""
    dispatch, parsed = call.backend.dispatch, call.parsed
    group = dispatch.group(parsed.generate.model)
    request = parsed.generate.with_defaults(group.card.sampling_defaults)
    echoes: list[Echo] = []
    if parsed.echo:
        goes_on = not parsed.options.prompt_alone
        request, echoes = await _with_echo(dispatch, group, request, goes_on)
    lengths: list[int] = []
    if request.prompt_only:
        lengths = await _prompt_lengths(dispatch, call.request[CLIENT], request, group)
    head = response_head("cmpl-", group, parsed.given_id)
    num_prompts = len(request.prompts)
    layout = CompletionFormat(head, request.num_all_choices, parsed.options, echoes, num_prompts)
    context = prepare(call, group, request, layout, head.id)
    if request.prompt_only:
        return _echoed(context, lengths, parsed.streaming)
    return await call.backend.generation.answer(call.request, context, parsed.streaming)


async def _with_echo(
    dispatch: Dispatch, group: Group, request: GenerateRequest, goes_on: bool
) -> tuple[GenerateRequest, list[Echo]]:
    """Find what the prompts of a completion look like; ApiError where nobody can say.

    Prompts that are cut, or that are shown token by token, are tokenized here, so that the
    returned request asks for just what is echoed. Where an answer `goes_on` behind them, prompts
    end before a character that they leave unfinished: the answer has all of it, or it is none.
    """
    by_token = request.sampling.num_logprobs >= 0
    echoes: list[Echo] = []
    prompts: list[PromptSource] = []
    firsts: dict[int, str] = {}
    kept = request.num_kept_tokens(group.card)
    for number, prompt in enumerate(request.prompts):
        field = request.field_of(number)
        text = prompt.text if isinstance(prompt, TextPrompt) else None
        if isinstance(prompt, TextPrompt) and (by_token or kept):
            answer = await dispatch.tokenize(group, prompt, field, False)
            prompt = IdsPrompt(answer.ids)
        if isinstance(prompt, IdsPrompt):
            ids = prompt.ids
            if 0 < kept < len(ids):
                ids = ids[-kept:] if request.truncate_side == "left" else ids[:kept]
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
    return replace(request, prompts=tuple(prompts), truncate_to=0), echoes


def _first(token_id: int, name: str, text: str) -> Candidate:
    """Describe a first token; one that the tokenizer put before a text has no place in it."""
    data = name.encode() if text.startswith(name) else b""
    return Candidate(token_id, name, data, 0.0)


async def _prompt_lengths(
    dispatch: Dispatch, client: Client, request: GenerateRequest, group: Group
) -> list[int]:
    """Count the tokens of the prompts of a request that is admitted meanwhile."""
    ticket = dispatch.admit(client, request, group)
    try:
        return await dispatch.prompt_lengths(request, group)
    finally:
        dispatch.release(ticket)


def _echoed(
    context: RequestContext[AnswerFormat], lengths: Sequence[int], streaming: bool
) -> web.Response:
    """Answer with the prompts alone; the events of a stream are all there at once."""
    request, layout = context.request, context.layout
    ended = Ending("length", Usage(0, 0, 0))
    usage = Usage(sum(lengths), 0, 0)
    context.span.set_response(usage, [ended.reason] * request.num_all_choices)
    if not streaming:
        answers = [CompleteAnswer("", None, ended)] * request.num_all_choices
        return json_response(layout.body(answers, usage))
    events: list[bytes] = []
    for choice in range(request.num_all_choices):
        events += (layout.opening(choice, None), layout.ending(choice, ended))
    events.append(layout.closing(usage))
    return web.Response(body=b"".join(events), headers=STREAM_HEADERS)


CHAT: Endpoint[ChatRequest] = Endpoint(
    "/v1/chat/completions",
    lambda body, request: parse_chat(body, request[WARNINGS]),
    generation(
        "chatcmpl-",
        lambda call, request, head: ChatFormat(head, request.num_all_choices, call.parsed.options),
    ),
    names.CHAT,
    adopts_request_id=True,
)
COMPLETIONS: Endpoint[CompletionRequest] = Endpoint(
    "/v1/completions",
    lambda body, request: parse_completion(body, request[WARNINGS]),
    _complete,
    names.TEXT_COMPLETION,
    adopts_request_id=True,
)
