"""What `Generate` takes of a `Tokenize`, once its prompt is ids and its answer's form is known."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

from common.link.codec import pack
from common.messages.address import AttemptId
from common.messages.generate import Generate, StreamHeader
from common.messages.sampling import GrammarSpec, SamplingParams
from common.messages.tokenize import Tokenize

# A character is four bytes at most, so four byte tokens; twice that for a word they may end.
PROMPT_TAIL = 8


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """What is known about the answer in advance: its grammar, and the formats to parse it by.

    `reasoning_open` means that the prompt ends inside the reasoning. `parameter_kinds` are packed,
    and so are the ids of what the client predicts.
    """

    grammar_spec: GrammarSpec | None = None
    tool_format: str = ""
    reasoning_format: str = ""
    reasoning_open: bool = False
    parameter_kinds: bytes = b""
    prediction_ids: bytes = b""


def generate_messages(
    message: Tokenize,
    ids: array[int],
    answer: ExpectedAnswer,
    sampling: SamplingParams,
    runs: Iterable[tuple[int, int]],
    traceparent: str,
) -> list[Generate]:
    """Make one `Generate` for each run (offset, number) of the choices; mostly there is one.

    Limits and ids have been checked, and `sampling` fits into them.
    """
    stream = message.stream
    reasoning_format = answer.reasoning_format if stream.parse_reasoning else ""
    header = StreamHeader(
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
        parameter_kinds=answer.parameter_kinds if stream.parse_tools else b"",
    )
    packed_header = pack(header)
    return [
        Generate(
            attempt=AttemptId(message.attempt.router, message.attempt.counter + offset),
            detokenizer=message.route.detokenizer,
            prompt_ids=ids.tobytes(),
            output_ids=message.output_ids,
            sampling=replace(sampling, grammar_spec=answer.grammar_spec),
            header=packed_header,
            admitted_at_s=message.admitted_at_s,
            num_choices=num_choices,
            first_choice=message.first_choice + offset,
            priority=message.priority,
            cache_salt=message.cache_salt,
            traceparent=traceparent,
            pooling=message.pooling,
            client=message.client,
            prediction_ids=answer.prediction_ids,
        )
        for offset, num_choices in runs
    ]


def call_key(seed: int, admitted_at_s: float) -> str:
    """Derive the key of a request's tool call ids; a retry has the same seed and admission time."""
    return hashlib.blake2b(f"{seed} {admitted_at_s!r}".encode(), digest_size=12).hexdigest()
