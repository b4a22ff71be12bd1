"""Reasoning comes apart from the content, whatever marks it."""

from __future__ import annotations

import pytest

from common.chat_formats import REASONING_FORMATS
from tests.unit.detokenizer.answer.answers import Answer, joined, new_parser, parse

# (text, begins inside, reasoning, content)
EXAMPLES = [
    ("<think>\nOne.\n\nTwo.\n</think>\n\nHello\n", False, "One.\n\nTwo.", "Hello\n"),
    ("\n<think>a < b </b></think>c", False, "a < b </b>", "c"),
    ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
    ("Hello <think>x</think>", False, "", "Hello <think>x</think>"),
    (" \n Hello", False, "", " \n Hello"),
    ("<thin", False, "", "<thin"),
    ("<think>never closed\n", False, "never closed\n", ""),
    ("One.\n</think>\nHello", True, "One.", "Hello"),
    ("<think>\nOne.</think>Hello</think>", True, "One.", "Hello</think>"),
    ("\n\n One.", True, " One.", ""),
    ("</think>Hello", True, "", "Hello"),
    ("\n", True, "", ""),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), EXAMPLES)
@pytest.mark.parametrize("size", [1, 5, 1_000])
def test_reasoning_comes_apart(
    text: str, is_open: bool, reasoning: str, content: str, size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for tools in ("", "hermes"):
        answer = parse(pieces, tools, "think", is_open)
        assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS.keys() - {"harmony"}))
def test_every_format_has_its_markers(name: str) -> None:
    markers = REASONING_FORMATS[name]
    text = f"{markers.begin}\nwhy\n{markers.end}\nso"
    expected = Answer(content="so", reasoning="why", order="rc")
    assert parse([text], reasoning=name) == expected
    assert parse(list(text), reasoning=name) == expected


def test_calls_are_looked_for_after_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer = parse(list(f"<think>\n{call}\n</think>\n\n{call}"), "hermes", "think")
    assert answer == Answer(content="", reasoning=call, calls=[["f", "{}"]], order="rt")


def test_reasoning_streams_as_it_comes() -> None:
    parser = new_parser("hermes", "think")
    assert joined(parser.push("<think>Hm")).reasoning == "Hm"
    assert parser.reasons
    assert joined(parser.push("</thin")).reasoning == ""
    assert joined(parser.push("g>")).reasoning == "</thing>"
    assert parser.may_reason
    parser.push("</think>\n")
    assert not parser.reasons
    assert joined(parser.push("So")).content == "So"
    assert not parser.may_reason


def test_formats_that_are_not_known_leave_the_text_alone() -> None:
    assert parse(["<think>a</think>b"], "unheard", "of").content == "<think>a</think>b"
