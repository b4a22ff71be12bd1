"""Harmony: messages by their channels, calls by their recipients, however the text comes."""

from __future__ import annotations

import pytest

from tests.unit.detokenizer.answer.answers import Answer, joined, new_parser, parse

NEXT = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
F = ["f", '{"a": 1}']

# (text, reasoning, content, calls)
ANSWERS = [
    (f"{ANALYSIS}Why.<|end|>{NEXT}{FINAL}So <b>1 < 2</b>.", "Why.", "So <b>1 < 2</b>.", []),
    (f"{FINAL}So.<|return|>", "", "So.", []),
    (f"{ANALYSIS}A.<|end|>{NEXT}{ANALYSIS}B.<|end|>{NEXT}{FINAL}C", "A.\n\nB.", "C", []),
    (f'{ANALYSIS}Why.<|end|>{NEXT}{CALL}{{"a": 1}}<|call|>', "Why.", "", [F]),
    (f'{ANALYSIS}Why.<|end|>{NEXT}{COMMENTARY}I look.<|end|>{NEXT}{CALL}{{"a": 1}}',
     "Why.", "I look.", [F]),
    (f'{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}<|call|>', "", "", [F]),
    (f'{ANALYSIS}Why.<|end|>{NEXT} to=functions.f<|channel|>commentary<|message|>{{"a": 1}}',
     "Why.", "", [F]),
    (f'{CALL}{{"a": "<|end|>"}}<|end|>{NEXT}{CALL}{{}}',
     "", "", [["f", '{"a": "<|end|>"}'], ["f", "{}"]]),
    (f"{CALL}<|call|>", "", "", [["f", "{}"]]),
    ("<|channel|>analysis to=browser.search code<|message|>{}", "", "", [["browser.search", "{}"]]),
    ("<|channel|>analysis to=python code<|message|>print(1, 2)\n<|call|>",
     "", "", [["python", "print(1, 2)"]]),
    ("<|channel|>commentary to=functions.f <|channel|>commentary <|constrain|>json<|message|>{}",
     "", "", [["f", "{}"]]),
    (f"{COMMENTARY}One.<|end|>{NEXT}{FINAL}Two.", "", "One.\n\nTwo.", []),
    (f"{FINAL[:-11]} <|constrain|>json<|message|>{{}}", "", "{}", []),
    ("The prompt began this.", "", "The prompt began this.", []),
    (f"{ANALYSIS}Cut off", "Cut off", "", []),
    (f"{ANALYSIS}Why.<|end|><|start|>assi", "Why.", "", []),
    (f"{ANALYSIS}Why.<|end|>{NEXT}<|channel|>fin", "Why.", "", []),
    (f"{ANALYSIS}Why.{FINAL}No end.", "Why.", "No end.", []),
    ("<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>", "",
     "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>", []),
    ("<|channel|>poem<|message|>Roses", "", "<|channel|>poem<|message|>Roses", []),
    ("to=me or not", "", "to=me or not", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_messages_come_apart_by_channel_and_recipient(
    text: str, reasoning: str, content: str, calls: list[list[str]], size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    answer = parse(pieces, "harmony", "harmony")
    assert (answer.reasoning, answer.content, answer.calls) == (reasoning, content, calls)


def test_a_prompt_may_end_inside_of_the_reasoning() -> None:
    text = f"so.<|end|>{NEXT}{FINAL}Yes."
    assert parse(list(text), "", "harmony", is_open=True) == Answer("Yes.", "so.", order="rc")


def test_without_tools_calls_stay_in_the_content_as_they_are() -> None:
    text = f"{CALL}{{}}<|call|>"
    assert parse(list(text), "", "harmony").content == text


def test_reasoning_is_known_as_such_while_it_comes() -> None:
    parser = new_parser("harmony", "harmony")
    assert joined(parser.push(f"{ANALYSIS}Hm")).reasoning == "Hm" and parser.reasons
    parser.push(f"<|end|>{NEXT}{FINAL}So")
    assert not parser.reasons and parser.may_reason
    assert joined(parser.push(f'<|end|>{NEXT}{CALL}{{"a')).calls == [["f", '{"a']]
