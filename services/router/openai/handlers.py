"""`/v1/chat/completions` and `/v1/completions`: from a request to a stream or a body."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from common.messages.failure import Ending, Usage
from common.telemetry import names
from services.router.admission import Client
from services.router.answer import Answer
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch
from services.router.fleet import Group
from services.router.generation import STREAM_HEADERS, Asked, Generation, response_head
from services.router.job import Job
from services.router.middleware import CLIENT, WARNINGS, adopt_request_id
from services.router.openai.chat import parse_chat
from services.router.openai.chat_format import ChatFormat
from services.router.openai.completion_format import CompletionFormat
from services.router.openai.completions import parse_completion
from services.router.openai.echo import Echo, echoed
from services.router.request_body import read_json
from services.router.request_span import RequestSpan
from services.router.sse import AnswerFormat, json_bytes


class OpenAIHandlers:
    """The handlers of both endpoints."""

    def __init__(
        self, dispatch: Dispatch, generation: Generation, settings: RouterSettings
    ) -> None:
        self._dispatch = dispatch
        self._generation = generation
        self._settings = settings

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat request."""
        body = await self._body(request)
        with RequestSpan(names.CHAT, request) as span:
            parsed = parse_chat(body, request[WARNINGS])
            group = self._dispatch.group(parsed.job.model)
            job = parsed.job.with_defaults(group.card.sampling_defaults)
            head = response_head("chatcmpl-", group, parsed.options.given_id)
            layout = ChatFormat(head, job.num_all_choices, parsed.options)
            span.asked(job, head.id)
            needs_ids = parsed.options.needs_ids
            asked = Asked(job, group, request[CLIENT], layout, span, needs_ids)
            return await self._generation.answer(request, asked, parsed.streaming)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion request."""
        body = await self._body(request)
        with RequestSpan(names.TEXT_COMPLETION, request) as span:
            parsed = parse_completion(body, request[WARNINGS])
            group = self._dispatch.group(parsed.job.model)
            job = parsed.job.with_defaults(group.card.sampling_defaults)
            echoes: list[Echo] = []
            if parsed.echo:
                goes_on = not parsed.options.prompt_alone
                job, echoes = await echoed(self._dispatch, group, job, goes_on)
            lengths: list[int] = []
            if job.prompt_only:
                lengths = await self._prompt_lengths(request[CLIENT], job, group)
            head = response_head("cmpl-", group, parsed.options.given_id)
            num_prompts = len(job.prompts)
            layout = CompletionFormat(
                head, job.num_all_choices, parsed.options, echoes, num_prompts
            )
            span.asked(job, head.id)
            needs_ids = parsed.options.needs_ids
            asked = Asked(job, group, request[CLIENT], layout, span, needs_ids)
            if job.prompt_only:
                return _echoed(asked, lengths, parsed.streaming)
            return await self._generation.answer(request, asked, parsed.streaming)

    async def _prompt_lengths(self, client: Client, job: Job, group: Group) -> list[int]:
        """Count the tokens of the prompts of a job that is admitted meanwhile."""
        ticket = self._dispatch.admit(client, job, group)
        try:
            return await self._dispatch.prompt_lengths(job, group)
        finally:
            self._dispatch.release(ticket)

    async def _body(self, request: web.Request) -> dict[str, object]:
        body = await read_json(request, self._settings)
        adopt_request_id(request, body)
        return body


def _echoed(asked: Asked[AnswerFormat], lengths: Sequence[int], streaming: bool) -> web.Response:
    """Answer with the prompts alone; the events of a stream are all there at once."""
    job, layout = asked.job, asked.layout
    ended = Ending("length", Usage(0, 0, 0))
    usage = Usage(sum(lengths), 0, 0)
    asked.span.answered(usage, [ended.reason] * job.num_all_choices)
    if not streaming:
        answers = [Answer("", None, ended)] * job.num_all_choices
        body = json_bytes(layout.body(answers, usage))
        return web.Response(body=body, content_type="application/json")
    events: list[bytes] = []
    for choice in range(job.num_all_choices):
        events += (layout.opening(choice, None), layout.ending(choice, ended))
    events.append(layout.closing(usage))
    return web.Response(body=b"".join(events), headers=STREAM_HEADERS)
