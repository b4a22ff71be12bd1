"""What the compose check takes for the same answer, and what for a failure."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of load.py, which lies beside the programs that it is for."""
    monkeypatch.syspath_prepend(str(DEPLOY))
    spec = importlib.util.spec_from_file_location("load", DEPLOY / "load.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("deployment", None)


def stream(*events: dict[str, Any], end: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


def chunk(text: str, end: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
    return {"id": f"chatcmpl-{id(text)}", "choices": [choice | more]}


def test_an_answer_is_the_same_however_it_was_cut_into_events(load: Any) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    first = load.answer_of(stream(chunk("To"), chunk("day", "stop"), usage), True)
    second = load.answer_of(stream(chunk("Today"), chunk("", "stop"), usage), True)
    assert first == second
    assert first["0 text"] == "Today"
    assert load.answer_of(stream(chunk("Tomorrow", "stop"), usage), True) != first
    assert "'Today' became 'Tomorrow'" in load.difference(first, first | {"0 text": "Tomorrow"})


def test_tokens_that_come_twice_make_another_answer(load: Any) -> None:
    first = load.answer_of(stream(chunk("a"), chunk("b", "stop")), True)
    assert load.answer_of(stream(chunk("a"), chunk("a"), chunk("b", "stop")), True) != first
    counted = {"choices": [], "usage": {"completion_tokens": 3}}
    assert load.answer_of(stream(chunk("a"), chunk("b", "stop"), counted), True) != first


def test_scores_belong_to_an_answer(load: Any) -> None:
    scores = ({"content": [{"token": "a", "logprob": score}]} for score in (-1.0, -2.0))
    scored = [chunk("a", logprobs=each) for each in scores]
    assert load.answer_of(stream(scored[0]), True) != load.answer_of(stream(scored[1]), True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (stream(chunk("a"), end=""), "without an end"),
        (stream({"type": "content_block_delta", "delta": {"text": "a"}}, end=""), "without an end"),
        (stream(chunk("a"), {"error": {"code": "aborted"}}), "an error"),
        ("", "without content"),
    ],
)
def test_an_answer_without_its_end_is_a_failure(load: Any, text: str, why: str) -> None:
    with pytest.raises(load.CheckFailed, match=why):
        load.answer_of(text, True)


def test_a_message_and_a_response_have_ends_of_their_own(load: Any) -> None:
    message = stream({"delta": {"text": "a"}}, {"type": "message_stop"}, end="")
    assert load.answer_of(message, True) == {"text": "a"}
    done = {"type": "response.completed", "response": {"usage": {"output_tokens": 1}}}
    response = stream({"type": "response.output_text.delta", "delta": "a"}, done, end="")
    assert load.answer_of(response, True)["output_tokens"] == 1
