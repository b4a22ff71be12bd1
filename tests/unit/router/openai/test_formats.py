"""Chunks and bodies, byte for byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.failure import Ending, Failure, Usage
from common.messages.logprobs import Candidate, TokenLogprob
from services.router.answer import CompleteAnswer, Delta, ResponseHead
from services.router.openai.chat_format import ChatFormat
from services.router.openai.chunks import AnswerOptions
from services.router.openai.completion_format import CompletionFormat, Echo
from services.router.sse import DONE, error_event, json_bytes, json_string
from tests.text_rows import columns

HEAD = ResponseHead("id-1", 1700000000, "demo", "fp_rev1")
USAGE = Usage(5, 3, 2)
STOPPED = Ending("stop", USAGE)

CHAT = (
    b'data: {"id":"id-1","object":"chat.completion.chunk","created":1700000000,"model":"demo",'
    b'"system_fingerprint":"fp_rev1","choices":'
)
TEXT = (
    b'data: {"id":"id-1","object":"text_completion","created":1700000000,"model":"demo",'
    b'"system_fingerprint":"fp_rev1","choices":'
)


def _token(text: str, logprob: float = -0.5, data: bytes | None = None) -> TokenLogprob:
    chosen = Candidate(1, text, text.encode() if data is None else data, logprob)
    return TokenLogprob(chosen, (chosen, Candidate(2, "x", b"x", float("-inf"))))


def test_a_chat_stream_byte_for_byte() -> None:
    layout = ChatFormat(HEAD, 2)
    assert layout.opening(1, None) == CHAT + (
        b'[{"index":1,"delta":{"role":"assistant","content":"","refusal":null},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert layout.template(0).plain('a"\n\u00e9') == CHAT + (
        b'[{"index":0,"delta":{"content":"a\\"\\n\xc3\xa9"},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert layout.ending(0, STOPPED) == CHAT + (
        b'[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
    )
    layout = ChatFormat(HEAD, 2, AnswerOptions(include_usage=True))
    assert (
        layout.closing(USAGE)
        == CHAT
        + (
            b'[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,'
            b'"prompt_tokens_details":{"cached_tokens":3},'
            b'"completion_tokens_details":{"reasoning_tokens":0,'
            b'"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}}\n\n'
        )
        + DONE
    )


def test_with_include_usage_every_other_chunk_has_a_null_usage() -> None:
    chat = ChatFormat(HEAD, 1, AnswerOptions(include_usage=True))
    text = CompletionFormat(HEAD, 1, AnswerOptions(include_usage=True))
    chunks = [chat.opening(0, None), chat.template(0).plain("a"), chat.ending(0, STOPPED)]
    chunks += [text.template(0).plain("a"), text.ending(0, STOPPED)]
    assert all(chunk.endswith(b'}],"usage":null}\n\n') for chunk in chunks)


def test_chat_logprobs_byte_for_byte() -> None:
    assert ChatFormat(HEAD, 1).delta(0, Delta("a", columns(_token("a")))) == CHAT + (
        b'[{"index":0,"delta":{"content":"a"},"logprobs":{"content":['
        b'{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":['
        b'{"token":"a","logprob":-0.5,"bytes":[97]},'
        b'{"token":"x","logprob":-9999.0,"bytes":[120]}]}],"refusal":null},'
        b'"finish_reason":null}]}\n\n'
    )


def test_a_completion_stream_byte_for_byte() -> None:
    layout = CompletionFormat(HEAD, 1)
    assert layout.opening(0, None) == b""
    assert layout.template(0).plain("a") == TEXT + (
        b'[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert layout.delta(0, Delta("b", columns(_token("b")))) == TEXT + (
        b'[{"index":0,"text":"b","logprobs":{"tokens":["b"],"token_logprobs":[-0.5],'
        b'"top_logprobs":[{"b":-0.5,"x":-9999.0}],"text_offset":[0]},"finish_reason":null}]}\n\n'
    )
    assert layout.ending(0, Ending("length", USAGE)) == TEXT + (
        b'[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}]}\n\n'
    )


def test_text_offsets_go_on_from_chunk_to_chunk() -> None:
    layout = CompletionFormat(HEAD, 1)
    offsets: list[int] = []
    halves = [_token("\ufffd", data="\N{GRINNING FACE}".encode()[:2])]
    halves += [_token("\ufffd", data="\N{GRINNING FACE}".encode()[2:])]
    for tokens in ([_token("ab"), _token("\u00e9")], halves, [_token("c")]):
        chunk = json.loads(layout.delta(0, Delta("", columns(*tokens)))[6:])
        offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 2, 3, 4, 4]


def test_a_character_that_the_prompt_began_is_the_texts_first() -> None:
    layout = CompletionFormat(HEAD, 1)
    euro = "\N{EURO SIGN}".encode()
    tokens = [_token("\ufffd", data=euro[1:2]), _token("\ufffd", data=euro[2:]), _token("c")]
    chunk = json.loads(layout.delta(0, Delta("\N{EURO SIGN}c", columns(*tokens)))[6:])
    assert chunk["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1]


def test_an_echo_opens_a_completion() -> None:
    layout = CompletionFormat(HEAD, 2, echoes=[Echo("p"), Echo("q")], num_prompts=2)
    assert b'"text":"q"' in layout.opening(1, None)
    answers = [CompleteAnswer("a", None, STOPPED), CompleteAnswer("b", None, STOPPED)]
    texts = [choice["text"] for choice in layout.body(answers, USAGE)["choices"]]
    assert texts == ["pa", "qb"]


@pytest.mark.parametrize("stop", ["###", 7])
def test_what_stopped_it_is_said_where_something_did(stop: str | int) -> None:
    ended = Ending("stop", USAGE, stop)
    for layout in (ChatFormat(HEAD, 1), CompletionFormat(HEAD, 1)):
        chunk = json.loads(layout.ending(0, ended)[6:])
        assert chunk["choices"][0]["stop_reason"] == stop
        body = layout.body([CompleteAnswer("a", None, ended)], USAGE)
        assert body["choices"][0]["stop_reason"] == stop


def test_bodies_have_openais_shape() -> None:
    answer = CompleteAnswer("a", columns(_token("a")), STOPPED)
    chat = ChatFormat(HEAD, 1).body([answer], USAGE)
    assert list(chat) == [
        "id",
        "object",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
    ]
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == "a"
    text = CompletionFormat(HEAD, 1).body([answer], USAGE)
    assert text["object"] == "text_completion"
    assert text["choices"][0]["logprobs"]["tokens"] == ["a"]
    assert text["choices"][0]["finish_reason"] == "stop"


def test_an_error_event_has_the_shape_of_an_error_body() -> None:
    event = error_event(Failure(503, "lost", "gone", None, True))
    assert event == (
        b'data: {"error": {"message": "gone", "type": "server_error", "param": null, '
        b'"code": "lost"}}\n\n'
    )


@given(st.text())
def test_any_text_is_one_line_and_comes_back(text: str) -> None:
    chunk = ChatFormat(HEAD, 1).template(0).plain(text)
    assert len(chunk.decode().splitlines()) == 2
    assert json.loads(chunk[6:])["choices"][0]["delta"]["content"] == text
    assert json.loads(json_string(text)) == text
    assert json.loads(json_bytes({"a": text})) == {"a": text}
