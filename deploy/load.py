"""Clients that ask without a pause while the check does things to the containers.

Each lane sends one request again and again, of another kind than its neighbours; its seed is its
own, so that every answer must be the lane's first one, given before anything was done.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from deployment import CheckFailed, wait_until

PATIENCE_S = 120.0  # for one answer; the machine may be busy
MAX_TOKENS = 200
MESSAGES = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 60, "maxLength": 90}},
            "required": ["city"],
        },
    },
}
OPENAI = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": MESSAGES, **OPENAI, **STREAM, "logprobs": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, **OPENAI, "n": 3}),
    ("/v1/completions", {"prompt": "Count", **OPENAI, **STREAM, "n": 2, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["One", "Two"], **OPENAI, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": "Go", **STREAM, "structured_outputs": {"regex": "[a-z]{90}"}}),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, **STREAM, "tools": [TOOL], "tool_choice": "required"},
    ),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": MAX_TOKENS, "stream": True}),
    ("/v1/responses", {"input": "Tell me a story.", "max_output_tokens": 100, "stream": True}),
    ("/tokenize", {"prompt": "How many tokens are in this line, and in all those before it?"}),
)
COUNTS = ("prompt_tokens", "completion_tokens", "output_tokens")
LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")
Answer: TypeAlias = dict[str, Any]


class Lanes:
    """Runs until `close`; whoever looks at `failures` decides what those mean."""

    def __init__(self, places: Sequence[str], model: str, num_lanes: int, key: str = "") -> None:
        """Ask at these `HOST:PORT`, the lanes in turn."""
        self.failures: list[str] = []
        self.num_answers = [0] * num_lanes
        self.num_cut = 0  # of the requests that may lose their connection: those begun before
        self.may_be_cut_until_s = float("-inf")
        self._places = places
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._model = model
        self._ended = threading.Event()
        self._first = [self._ask(lane) for lane in range(num_lanes)]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), daemon=True)
            for lane in range(num_lanes)
        ]
        for thread in self._threads:
            thread.start()

    def go_on(self) -> None:
        """Wait until every lane has the answer to a request sent after this call, all as before."""
        aims = [num + 2 for num in self.num_answers]
        wait_until(
            lambda: bool(self.failures) or all(map(int.__ge__, self.num_answers, aims)),
            "every lane goes on",
            2 * PATIENCE_S,
        )
        self.require_none()

    def require_none(self) -> None:
        """Raise CheckFailed if a request has failed."""
        if self.failures:
            said = "; ".join(self.failures[:4])
            raise CheckFailed(f"{len(self.failures)} requests failed, such as {said}"[:3000])

    def close(self) -> int:
        """End after the requests that run; returns how many answers there were."""
        self.stop()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return sum(self.num_answers)

    def stop(self) -> None:
        """Begin no more requests."""
        self._ended.set()

    def _run(self, lane: int) -> None:
        while not self._ended.is_set():
            began_at_s = time.monotonic()
            try:
                answer = self._ask(lane)
            except (OSError, http.client.HTTPException) as error:
                if began_at_s < self.may_be_cut_until_s:
                    self.num_cut += 1
                else:
                    self._fails(lane, began_at_s, repr(error))
            except (CheckFailed, ValueError, KeyError) as error:
                self._fails(lane, began_at_s, repr(error))
            else:
                if answer != self._first[lane]:
                    self._fails(lane, began_at_s, difference(self._first[lane], answer))
                self.num_answers[lane] += 1

    def _fails(self, lane: int, began_at_s: float, what: str) -> None:
        path, fields = KINDS[lane % len(KINDS)]
        seconds = time.monotonic() - began_at_s
        self.failures.append(f"{path} with {[*fields]} after {seconds:.1f} s: {what}")

    def _ask(self, lane: int) -> Answer:
        path, fields = KINDS[lane % len(KINDS)]
        body = {"model": self._model, "seed": lane, **fields}
        place = self._places[lane // len(KINDS) % len(self._places)]
        connection = http.client.HTTPConnection(place, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps(body), self._headers)
            reply = connection.getresponse()
            text = reply.read().decode()
        finally:
            connection.close()
        if reply.status != 200:
            raise CheckFailed(f"{path}: {reply.status} {text[:500]}")
        return answer_of(text, bool(fields.get("stream")))


def answer_of(text: str, streams: bool) -> Answer:
    """What an answer says, however it was cut into events, without its ids and times."""
    if not streams:
        events = [json.loads(text)]
    else:
        data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        events = [json.loads(line) for line in data if line != "[DONE]"]
        if data[-1:] != ["[DONE]"] and events[-1:] and events[-1].get("type") not in LAST_EVENTS:
            raise CheckFailed(f"a stream without an end: …{text[-500:]!r}")
    found: Answer = {}
    for event in events:
        if event.get("error"):
            raise CheckFailed(f"an error in the answer: {event}")
        for place, value in said(event):
            found[place] = found[place] + value if place in found else value
    if not found:
        raise CheckFailed(f"an answer without content: {text[:500]!r}")
    return found


def said(event: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The places of an answer that an event adds to, and what it adds there."""
    for choice in event.get("choices", ()):
        at = choice["index"]
        part = choice.get("delta") or choice.get("message") or choice
        found = {"text": part.get("text", part.get("content")), "end": choice["finish_reason"]}
        for call in part.get("tool_calls") or ():
            found |= {"name": call["function"].get("name")}
            found |= {"arguments": call["function"].get("arguments")}
        found |= {k: v for k, v in (choice.get("logprobs") or {}).items() if k != "text_offset"}
        yield from ((f"{at} {name}", value) for name, value in found.items() if value is not None)
    delta = event.get("delta")
    if isinstance(delta, str):  # of Responses
        yield event["type"], delta
    elif isinstance(delta, dict):  # of Messages
        yield from ((key, delta[key]) for key in ("text", "stop_reason") if delta.get(key))
    whole = event.get("response") or event  # the last event of Responses has all of it
    if event.get("type") not in ("response.created", "response.in_progress"):
        usage = whole.get("usage") or {}
        yield from ((key, usage[key]) for key in COUNTS if key in usage)
    yield from ((key, event[key]) for key in ("tokens", "count") if key in event)


def difference(first: Answer, second: Answer) -> str:
    """The first place where two answers differ."""
    for key in sorted({*first, *second}):
        if first.get(key) != second.get(key):
            return f"{key}: {first.get(key)!r:.300} became {second.get(key)!r:.300}"
    return "nothing differs"
