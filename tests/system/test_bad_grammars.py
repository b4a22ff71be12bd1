"""Grammars made to explode: each ends as an answer or a 400, and nobody else waits for it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S
from tests.system.aftermath import Aftermath
from tests.system.bad_requests import SOUND, TEXT, USER

REFUSALS = {"invalid_grammar", "grammar_failed", "grammar_timeout", "grammar_too_large"}
HARMLESS = {"regex": "[ab]{4}"}


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    shape = {"name": "a", "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": shape}}


def _regex(value: str) -> dict[str, Any]:
    return {"regex": value}


def _lark(value: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": value}}


def _references(depth: int, width: int) -> dict[str, Any]:
    """Definitions that each use the next one several times: width ** depth in all."""
    names = [f"p{at}" for at in range(width)]
    definitions: dict[str, Any] = {
        f"d{level}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{level + 1}"} for name in names},
            "required": names,
        }
        for level in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": {"type": "string"}}}


LETTERS = "abcdefghijklmnopqrst"


def endless(number: int) -> dict[str, Any]:
    """A grammar that takes any time that it is given, other than those of other numbers."""
    patterns = [{"type": "string", "pattern": f".*{a}.{{10}}.*"} for a in LETTERS]
    return _schema({"allOf": [*patterns, {"pattern": f"{number}"}]})


BOMBS: Mapping[str, dict[str, Any]] = {
    "a schema of 40 ** 10 definitions": _schema(_references(10, 40)),
    "a text of 10 ** 9 characters": _schema({"type": "string", "minLength": 10**9}),
    "10 ** 9 items": _schema({"type": "array", "items": {"type": "string"}, "minItems": 10**9}),
    "1000 x 1000 of a pattern": _schema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
    "patterns that all hold": endless(0),
    "3,000 properties": _schema({"properties": {f"p{at}": {} for at in range(3000)}}),
    "an integer of 300 digits": _schema({"type": "integer", "minimum": 0, "maximum": 10**300}),
    "a number of 300 digits": _schema({"type": "number", "multipleOf": 1e-300}),
    "a regex of 10 ** 9": _regex("a{1000000000}"),
    "a regex of 100 ** 5": _regex("((((a{100}){100}){100}){100}){100}"),
    "a regex of 2,000 alternatives": _regex("(x+x+)+y|" * 2000 + "z"),
    "a regex of 2 ** 30 states": _regex("(a|b)*a(a|b){30}c"),
    "a regex that backtracks": _regex("(?:a?){5000}a{5000}"),
    "a deep regex": _regex("(" * 5000 + "a" + ")" * 5000),
    "an ambiguous grammar": _lark('start: s\ns: s s | s s s | "a"'),
    "a grammar of 2 ** 60": _lark(
        "start: a0\n" + "".join(f"a{at}: a{at + 1} a{at + 1}\n" for at in range(60)) + 'a60: "x"'
    ),
    "a grammar of nothing": _lark('start: a*\na: b*\nb: ""'),
    "a circle of 3,000 rules": _lark(
        "start: r0\n" + "".join(f'r{at}: "x{at}" r{(at + 1) % 3000}\n' for at in range(3000))
    ),
    "a grammar of 10 ** 6": _lark('start: ("a" "b"){1000000}'),
    "a lexeme of 2 ** 75": _lark("start: A\nA: /.*a.{20}/ & /.*b.{25}/ & /.*c.{30}/"),
    "a deep grammar": _lark("start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "a deep GBNF": _lark("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
}


@pytest.fixture
def aftermath(strict_stack: Stack) -> Iterator[Aftermath]:
    """A server that is looked at before and after."""
    found = Aftermath.of(strict_stack)
    yield found
    found.check()


def test_a_bomb_is_answered_or_refused(strict_stack: Stack, aftermath: Aftermath) -> None:
    for name, rules in BOMBS.items():
        status, answer = ask(strict_stack, rules)
        if status == 200:
            assert answer["choices"][0]["finish_reason"] in ("stop", "length"), name
        else:
            error = answer["error"]
            assert status == 400, (name, error)
            assert error["code"] in REFUSALS or "too deep" in error["message"], (name, error)
            assert error["param"] and len(json.dumps(error)) < 2000, name


def test_others_stream_on_while_a_bomb_is_compiled(
    strict_stack: Stack, aftermath: Aftermath
) -> None:
    assert ask(strict_stack, HARMLESS)[0] == 200  # from here on its grammar is known
    # A machine may be busy while one is compiled, but not each time.
    assert any(others_went_on(strict_stack, endless(number)) for number in range(20))


def others_went_on(stack: Stack, bomb: dict[str, Any]) -> bool:
    """Whether a stream and another request went on before a bomb was given up."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    body = SOUND[TEXT] | {"stream": True, "max_tokens": 8000, "ignore_eos": True}
    connection.request("POST", TEXT, json.dumps(body), {"Content-Type": "application/json"})
    stream = connection.getresponse()
    assert stream.readline().startswith(b"data: ")
    with ThreadPoolExecutor(1) as pool:
        dropped = pool.submit(ask, stack, bomb)
        num_events = sum(stream.readline().startswith(b"data: ") for _ in range(200))
        assert ask(stack, HARMLESS)[0] == 200
        went_on = num_events == 100 and not dropped.done()
        assert dropped.result()[0] == 400
    connection.close()
    return went_on


def test_many_bombs_at_once_leave_a_server(strict_stack: Stack, aftermath: Aftermath) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda number: ask(strict_stack, endless(number)), range(100, 103))
        assert [status for status, _ in answers] == [400] * 3


@pytest.mark.parametrize(
    "said",
    [
        "{{ 7 * 7 }}",
        "{% for x in range(10 ** 9) %}{{ x }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}{# gone #}",
        "{%- raw -%}{{ messages }}",
        "${7*7} #{7*7} <%= 7*7 %> %s {0} \\u007b",
    ],
)
def test_what_a_message_says_is_no_template(strict_stack: Stack, said: str) -> None:
    messages = [{**USER, "content": said}, {"role": "assistant", "content": said}, USER]
    tokens = posted(strict_stack, "/tokenize", {"messages": messages})["tokens"]
    assert posted(strict_stack, "/detokenize", {"tokens": tokens})["prompt"].count(said) == 2


def ask(stack: Stack, rules: dict[str, Any]) -> tuple[int, Any]:
    """Ask for a completion under rules; returns status and answer."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    body = json.dumps(SOUND[TEXT] | rules)
    try:
        connection.request("POST", TEXT, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def posted(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask for something that is no completion."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return dict(json.load(connection.getresponse()))
    finally:
        connection.close()
