"""`/v1/chat/completions`: its request and its endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field

from common.messages.sampling import SamplingParams
from common.messages.tokenize import ChatPrompt, StreamSettings
from common.telemetry import trace
from services.router.endpoint import ApiRequest, Endpoint, generation
from services.router.errors import bad_field
from services.router.middleware import WARNINGS
from services.router.openai.chat_format import ChatFormat
from services.router.openai.chunks import AnswerOptions
from services.router.openai.messages import Messages, final_words
from services.router.openai.prediction import Prediction
from services.router.openai.rules import make_rules, with_schema
from services.router.openai.sampling import (
    SamplingFields,
    TopLogprobs,
    num_candidates,
    warn_of_all,
)
from services.router.openai.structure import StructureFields
from services.router.openai.template import (
    Documents,
    Effort,
    NoSpecialTokens,
    TemplateKwargs,
    budget_of,
    chat_prompt,
    pack_variables,
)
from services.router.openai.tools import (
    ChatTools,
    Choosing,
    FunctionCall,
    Functions,
    ToolChoice,
    Tools,
    choose_tools,
    make_tools,
)
from services.router.prompts import MAX_INT32
from services.router.request_model import UNSUPPORTED_FIELDS, OpenAIModel, RefusedFields
from services.router.request_warnings import Warnings


class ConversationFields(OpenAIModel):
    """The fields of chat requests other than sampling, which `/tokenize` takes, too."""

    messages: Messages
    """roles system, developer, user, assistant, tool, function; content as text, or as parts of the
    types `text`, `input_text`, `output_text`, `refusal`; arguments as JSON text or as an object"""
    tools: ChatTools = []
    """[tools](tools.md) that the answer may call"""
    tool_choice: Choosing = ToolChoice()
    """whether the answer may, must or must not call a [tool](tools.md), and which one"""
    parallel_tool_calls: bool | None = None
    """false for one [call](tools.md) at most"""
    functions: Functions = []
    """the older form of `tools`"""
    function_call: FunctionCall = None
    """the older form of `tool_choice`"""
    reasoning_effort: Effort | None = None
    """how much to [reason](tools.md#reasoning), if the template reads that"""
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_INT32)
    """the most tokens of [reasoning](tools.md#reasoning); -1 for no limit"""
    include_reasoning: bool | None = None
    """false leaves the [reasoning](tools.md#reasoning) out of the answer"""
    separate_reasoning: bool | None = None
    """false leaves the [reasoning](tools.md#reasoning) in the text of the answer"""
    add_generation_prompt: bool | None = None
    """whether the template begins the assistant's turn; not with `continue_final_message`"""
    continue_final_message: bool | None = None
    """whether the answer continues the last message instead of following it"""
    chat_template_kwargs: TemplateKwargs = None
    """variables of the chat template, as far as the server lets requests set them"""
    documents: Documents = None
    """documents for a chat template that reads them"""
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    """another name for `max_tokens`"""
    logprobs: bool | None = None
    """whether the answer has the log probability of each token"""
    top_logprobs: TopLogprobs = None
    echo: bool | None = None
    """begin the answer with the last message, if that is the assistant's; with `logprobs` it has
    `prompt_logprobs`, too"""

    @property
    def offered_tools(self) -> Tools:
        """The tools, given as `tools` or as `functions`, their older form; ApiError 400."""
        if not self.functions and self.function_call is None:
            return choose_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.tools:
            raise bad_field("functions", "cannot be used together with tools")
        choice = self.function_call or ToolChoice()
        return make_tools(self.functions, choice, False, "function_call")  # one call at most

    def template_input(self, tools: Tools) -> ChatPrompt:
        """Return the conversation as the tokenizer renders it; ApiError 400."""
        continues = bool(self.continue_final_message)
        adds = (not continues) if self.add_generation_prompt is None else self.add_generation_prompt
        variables = pack_variables(self.chat_template_kwargs, self.documents, self.reasoning_effort)
        return chat_prompt(self.messages, tools, adds, continues, variables)


class ChatFields(StructureFields, SamplingFields, ConversationFields):
    """A chat request."""

    refused: ClassVar[Mapping[str, RefusedFields]] = {
        **UNSUPPORTED_FIELDS,
        "prompt": RefusedFields(why="use messages, or /v1/completions"),
    }

    prediction: Prediction = None
    """`{"type": "content", "content": …}`, a string or parts of the type `text`: what the answer is
    expected to repeat for the most part, which makes it [faster](../speculative.md#a-prediction)"""
    add_special_tokens: NoSpecialTokens = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ApiRequest):
    options: AnswerOptions


def parse_chat(body: dict[str, Any], warnings: Warnings) -> ChatRequest:
    """Validate a chat request; ApiError 400 names the field at fault."""
    fields = ChatFields.read(body, warnings)
    tools, structure = fields.offered_tools, fields.structure
    prompt = with_schema(fields.template_input(tools), structure, tools.use)
    sampling = _sampling(fields)
    budget = budget_of(
        fields.reasoning_effort, fields.thinking_token_budget, fields.chat_template_kwargs
    )
    rules = make_rules(structure, tools, warnings, budget, fields.allowed_ids, fields.bad_words)
    request = fields.generate_request(
        prompts=(prompt,),
        prompt_field="messages",
        sampling=sampling,
        stream=_stream_settings(fields, tools),
        rules=rules,
        max_tokens_field="max_tokens" if fields.max_tokens else "max_completion_tokens",
        prediction=fields.prediction or "",
    )
    fields.warn(warnings)
    warn_of_all("top_logprobs", fields.top_logprobs, warnings)
    options = replace(
        fields.options(),
        include_reasoning=fields.include_reasoning is not False,
        named_tool=tools.use is not None and tools.use.choice == "named",
        functions=bool(fields.functions),
        echo=final_words(fields.messages) if fields.echo else "",
        prompt_logprobs=sampling.num_prompt_logprobs >= 0,
    )
    return ChatRequest(
        generate=request,
        streaming=bool(fields.stream),
        given_id=fields.given_id,
        wants_ids=options.needs_ids,
        options=options,
    )


def _stream_settings(fields: ChatFields, tools: Tools) -> StreamSettings:
    """Return the detokenizer's settings; hidden reasoning has to be parsed, too."""
    return replace(
        fields.stream_settings(),
        parse_tools=tools.use is not None,
        parse_reasoning=fields.separate_reasoning is not False or fields.include_reasoning is False,
    )


def _sampling(fields: ChatFields) -> SamplingParams:
    """Return the sampling settings; an echo has logprobs where the answer has them, as in vLLM."""
    num_logprobs = _num_logprobs(fields)
    sampling = fields.sampling(_max_tokens(fields), num_logprobs)
    if not fields.echo or fields.stream or fields.prompt_logprobs is not None:
        return sampling
    return replace(sampling, num_prompt_logprobs=num_logprobs)


def _max_tokens(fields: ChatFields) -> int:
    """Resolve the two names of the limit; 0, which is as much as fits, if neither is given."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_field("max_completion_tokens", f"contradicts max_tokens, which is {old}")
    return new or old or 0


def _num_logprobs(fields: ChatFields) -> int:
    if not fields.logprobs:
        if fields.top_logprobs:
            raise bad_field("top_logprobs", "is only allowed together with logprobs: true")
        return -1
    return num_candidates(fields.top_logprobs or 0)


CHAT: Endpoint[ChatRequest] = Endpoint(
    "/v1/chat/completions",
    lambda body, request: parse_chat(body, request[WARNINGS]),
    generation(
        "chatcmpl-",
        lambda call, request, head: ChatFormat(head, request.num_all_choices, call.parsed.options),
    ),
    trace.CHAT,
    adopts_request_id=True,
)
