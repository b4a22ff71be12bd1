"""Parsed answers in chat's shape: byte for byte, and the same however they are cut."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.messages.arrays import int32s
from common.messages.failure import Ending, Usage
from common.messages.logprobs import Candidate, TokenLogprob
from common.messages.text import Part, TextOpened
from services.router.answer import AnswerParts, CompleteAnswer, Delta, ResponseHead
from services.router.openai.chat_format import ChatFormat
from services.router.openai.chunks import AnswerOptions
from tests.text_rows import columns

HEAD = ResponseHead("id-1", 1700000000, "demo", "fp_rev1")
BEGIN = (
    b'data: {"id":"id-1","object":"chat.completion.chunk","created":1700000000,"model":"demo",'
    b'"system_fingerprint":"fp_rev1","choices":[{"index":0,"delta":'
)
END = b',"logprobs":null,"finish_reason":null}]}\n\n'
TOKEN = TokenLogprob(Candidate(1, "a", b"a", -0.5), ())


def _delta(*parts: Part, **more: Any) -> Delta:
    return Delta(parts=list(parts), **more)


def _messages(data: bytes) -> list[Any]:
    return [json.loads(each[6:]) for each in data.split(b"\n\n") if each]


def test_parts_byte_for_byte() -> None:
    layout = ChatFormat(HEAD, 1)
    assert layout.delta(0, _delta(Part("reasoning", 'a"'))) == BEGIN + (
        b'{"reasoning":"a\\"","reasoning_content":"a\\""}' + END
    )
    assert layout.delta(0, _delta(Part("call", "f", 2, "call_x"))) == BEGIN + (
        b'{"tool_calls":[{"index":2,"id":"call_x","type":"function",'
        b'"function":{"name":"f","arguments":""}}]}' + END
    )
    assert layout.delta(0, _delta(Part("arguments", '{"a":', 2))) == BEGIN + (
        b'{"tool_calls":[{"index":2,"function":{"arguments":"{\\"a\\":"}}]}' + END
    )
    assert layout.delta(0, _delta(Part("content", "a"))) == BEGIN + b'{"content":"a"}' + END


def test_parts_keep_their_order_and_the_first_chunk_has_the_logprobs_and_ids() -> None:
    layout = ChatFormat(HEAD, 1, AnswerOptions(token_ids=True))
    parts = (Part("reasoning", "r"), Part("content", "c"), Part("call", "f", 0, "id"))
    chunks = _messages(layout.delta(0, _delta(*parts, logprobs=columns(TOKEN), token_ids=[5, 6])))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [list(choice["delta"])[0] for choice in choices] == [
        "reasoning",
        "content",
        "tool_calls",
    ]
    assert [choice["token_ids"] for choice in choices] == [[5, 6], [], []]
    assert [choice["logprobs"] is None for choice in choices] == [False, True, True]


def test_logprobs_come_even_where_their_tokens_show_nothing() -> None:
    for options in (AnswerOptions(), AnswerOptions(include_reasoning=False)):
        hidden = _delta(
            Part("reasoning", "r" * (not options.include_reasoning)), logprobs=columns(TOKEN)
        )
        (chunk,) = _messages(ChatFormat(HEAD, 1, options).delta(0, hidden))
        assert chunk["choices"][0]["delta"] == {"content": ""}
        assert chunk["choices"][0]["logprobs"]["content"][0]["token"] == "a"
    assert ChatFormat(HEAD, 1).delta(0, _delta(Part("content", ""))) == b""


def test_an_answer_of_calls_alone_has_no_content() -> None:
    layout = ChatFormat(HEAD, 1)
    ended = Ending("stop", Usage(5, 0, 2), num_calls=1)
    for text, expected in (("\n", None), ("Hi", "Hi")):
        parts = AnswerParts([Part("content", text), Part("call", "f", 0, "id")])
        answer = CompleteAnswer(parts.content, None, ended, calls=parts.calls())
        message = layout.body([answer], Usage(5, 0, 2))["choices"][0]["message"]
        assert message["content"] == expected
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}


parts = st.one_of(
    st.builds(Part, st.sampled_from(["content", "reasoning"]), st.text(max_size=5)),
    st.builds(
        Part, st.just("call"), st.sampled_from(["f", "g"]), st.integers(0, 2), st.just("call_1")
    ),
    st.builds(Part, st.just("arguments"), st.text(max_size=5), st.integers(0, 2)),
)


@given(st.lists(parts, max_size=12), st.data())
def test_a_stream_says_what_the_whole_answer_says(all_parts: list[Part], data: Any) -> None:
    """Deltas merge while a client is slow, in any way; what it gets adds up to the same."""
    layout = ChatFormat(HEAD, 1, data.draw(st.builds(AnswerOptions, token_ids=st.booleans())))
    layout.opening(0, TextOpened(0, 5, 0, int32s()))
    stream = b""
    waiting = Delta()
    for number, part in enumerate(all_parts):
        waiting.take("", None, (part,), (number,))
        if data.draw(st.booleans()):
            stream += layout.delta(0, waiting)
            waiting = Delta()
    stream += layout.delta(0, waiting)
    said = {"content": "", "reasoning": ""}
    arguments: dict[int, str] = {}
    for chunk in _messages(stream):
        delta = chunk["choices"][0]["delta"]
        for kind in said:
            said[kind] += delta.get(kind, "")
        for call in delta.get("tool_calls", []):
            more = call["function"]["arguments"]
            arguments[call["index"]] = arguments.get(call["index"], "") + more
    whole = AnswerParts(all_parts)
    assert said == {"content": whole.content, "reasoning": whole.reasoning}
    for index in {part.index for part in all_parts if part.kind == "call"}:
        expected = "".join(
            part.text for part in all_parts if part.kind == "arguments" and part.index == index
        )
        assert arguments[index] == expected
