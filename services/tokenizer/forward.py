"""Turns a tokenized request into what compute is to do, and what the detokenizer is to know."""

from __future__ import annotations

from array import array

from common.link.codec import pack
from common.messages.address import AttemptId
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from common.messages.stream import StreamHeader
from common.messages.tokenize import Tokenize
from services.tokenizer.work import Work

# A character is four bytes at most, so four byte tokens; twice that for a word they may end.
PROMPT_TAIL = 8


def generates(
    work: Work, message: Tokenize, ids: array[int], sampling: SamplingParams, traceparent: str
) -> list[Generate]:
    """Make one `Generate` for each run of choices that nobody has aborted; mostly there is one."""
    header = pack(_header(message, ids, sampling, traceparent))
    return [
        Generate(
            attempt=AttemptId(message.attempt.router, message.attempt.counter + offset),
            detokenizer=message.itinerary.detokenizer,
            prompt_ids=ids,
            output_ids=message.output_ids,
            sampling=sampling,
            header=header,
            admitted_at_s=message.admitted_at_s,
            num_choices=num_choices,
            first_choice=message.first_choice + offset,
            priority=message.priority,
            cache_salt=message.cache_salt,
            traceparent=traceparent,
        )
        for offset, num_choices in work.live_runs()
    ]


def _header(
    message: Tokenize, ids: array[int], sampling: SamplingParams, traceparent: str
) -> StreamHeader:
    stream = message.stream
    return StreamHeader(
        reply=message.itinerary.reply,
        stop=stream.stop,
        include_stop_str_in_output=stream.include_stop_str_in_output,
        skip_special_tokens=stream.skip_special_tokens,
        num_logprobs=sampling.num_logprobs,
        min_tokens=sampling.min_tokens,
        prompt_tail_ids=tuple(ids[-PROMPT_TAIL:]),
        accepted_ids=tuple(message.output_ids),
        accepted_characters=message.accepted_characters,
        traceparent=traceparent,
    )
