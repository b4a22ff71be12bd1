"""Turns a tokenized request into what compute is to do, and what the detokenizer is to know."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from common.link.codec import pack
from common.messages.address import AttemptId
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from common.messages.stream import StreamHeader
from common.messages.tokenize import Tokenize
from services.tokenizer.job import Outcome
from services.tokenizer.work import Work

# A character is four bytes at most, so four byte tokens; twice that for a word they may end.
PROMPT_TAIL = 8


def generates(
    work: Work, message: Tokenize, outcome: Outcome, sampling: SamplingParams, traceparent: str
) -> list[Generate]:
    """Make one `Generate` for each run of choices that nobody has aborted; mostly there is one."""
    header = pack(_header(message, outcome, sampling, traceparent))
    return [
        Generate(
            attempt=AttemptId(message.attempt.router, message.attempt.counter + offset),
            detokenizer=message.route.detokenizer,
            prompt_ids=outcome.ids.tobytes(),
            output_ids=message.output_ids,
            sampling=replace(sampling, guidance=outcome.answer.guidance),
            header=header,
            admitted_at_s=message.admitted_at_s,
            num_choices=num_choices,
            first_choice=message.first_choice + offset,
            priority=message.priority,
            cache_salt=message.cache_salt,
            traceparent=traceparent,
            pooling=message.pooling,
        )
        for offset, num_choices in work.live_runs()
    ]


def call_key(seed: int, admitted_at_s: float) -> str:
    """Make the key of a request's tool call ids of what a retry has too: seed and admission."""
    return hashlib.blake2b(f"{seed} {admitted_at_s!r}".encode(), digest_size=12).hexdigest()


def _header(
    message: Tokenize, outcome: Outcome, sampling: SamplingParams, traceparent: str
) -> StreamHeader:
    stream, ids, answer = message.stream, outcome.ids, outcome.answer
    reasoning_format = answer.reasoning_format if stream.parse_reasoning else ""
    return StreamHeader(
        reply=message.route.reply,
        stop=stream.stop,
        include_stop_str_in_output=stream.include_stop_str_in_output,
        skip_special_tokens=stream.skip_special_tokens,
        num_logprobs=sampling.num_logprobs,
        min_tokens=sampling.min_tokens,
        prompt_tail_ids=tuple(ids[-PROMPT_TAIL:]),
        accepted_ids=tuple(message.output_ids),
        accepted_characters=message.accepted_characters,
        traceparent=traceparent,
        tool_format=answer.tool_format if stream.parse_tools else "",
        reasoning_format=reasoning_format,
        reasoning_open=bool(reasoning_format) and answer.reasoning_open,
        call_key=call_key(sampling.seed, message.admitted_at_s),
        first_counter=message.attempt.counter - message.first_choice,
        prompt_ids=ids.tobytes() if stream.return_prompt_ids else b"",
    )
