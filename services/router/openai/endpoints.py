"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from common.messages.failure import Ending, Usage
from common.telemetry import names
from services.router.answer import CompleteAnswer
from services.router.dispatch import Dispatch
from services.router.endpoint import Call, Endpoint, generation, json_response, prepare
from services.router.fleet import Group
from services.router.generate_request import GenerateRequest
from services.router.generation import STREAM_HEADERS, RequestContext, response_head
from services.router.middleware import CLIENT, WARNINGS
from services.router.openai.chat import ChatRequest, parse_chat
from services.router.openai.chat_format import ChatFormat
from services.router.openai.completion_format import CompletionFormat
from services.router.openai.completions import CompletionRequest, parse_completion
from services.router.openai.echo import Echo, echoed
from services.router.sse import AnswerFormat


async def _complete(call: Call[CompletionRequest]) -> web.StreamResponse:
    """Continue the prompts; those that come back, and alone, do not go round the ring."""
    dispatch, parsed = call.backend.dispatch, call.parsed
    group = dispatch.group(parsed.job.model)
    job = parsed.job.with_defaults(group.card.sampling_defaults)
    echoes: list[Echo] = []
    if parsed.echo:
        goes_on = not parsed.options.prompt_alone
        job, echoes = await echoed(dispatch, group, job, goes_on)
    lengths: list[int] = []
    if job.prompt_only:
        lengths = await _prompt_lengths(dispatch, call.request, job, group)
    head = response_head("cmpl-", group, parsed.given_id)
    num_prompts = len(job.prompts)
    layout = CompletionFormat(head, job.num_all_choices, parsed.options, echoes, num_prompts)
    context = prepare(call, group, job, layout, head.id)
    if job.prompt_only:
        return _echoed(context, lengths, parsed.streaming)
    return await call.backend.generation.answer(call.request, context, parsed.streaming)


async def _prompt_lengths(
    dispatch: Dispatch, request: web.Request, job: GenerateRequest, group: Group
) -> list[int]:
    """Count the tokens of the prompts of a job that is admitted meanwhile."""
    ticket = dispatch.admit(request[CLIENT], job, group)
    try:
        return await dispatch.prompt_lengths(job, group)
    finally:
        dispatch.release(ticket)


def _echoed(
    context: RequestContext[AnswerFormat], lengths: Sequence[int], streaming: bool
) -> web.Response:
    """Answer with the prompts alone; the events of a stream are all there at once."""
    job, layout = context.request, context.layout
    ended = Ending("length", Usage(0, 0, 0))
    usage = Usage(sum(lengths), 0, 0)
    context.span.set_response(usage, [ended.reason] * job.num_all_choices)
    if not streaming:
        answers = [CompleteAnswer("", None, ended)] * job.num_all_choices
        return json_response(layout.body(answers, usage))
    events: list[bytes] = []
    for choice in range(job.num_all_choices):
        events += (layout.opening(choice, None), layout.ending(choice, ended))
    events.append(layout.closing(usage))
    return web.Response(body=b"".join(events), headers=STREAM_HEADERS)


CHAT: Endpoint[ChatRequest] = Endpoint(
    "/v1/chat/completions",
    lambda body, request: parse_chat(body, request[WARNINGS]),
    generation(
        "chatcmpl-",
        lambda call, job, head: ChatFormat(head, job.num_all_choices, call.parsed.options),
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
