"""Requests of every kind whose answers are the same whenever they are asked, and their clients.

An answer is folded into one table that does not depend on how a stream was cut into events, so that
it can be compared with that of a run without a fault, byte for byte.
"""

from __future__ import annotations

import difflib
import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

TIMEOUT_S = 240.0  # without a byte, keep-alives included: a machine may be busy
# These differ from one asking to the next: names, times, what a prefix cache had, and drafts.
VOLATILE = frozenset(
    "id item_id created created_at completed_at sequence_number system_fingerprint cached_tokens "
    "cache_read_input_tokens cache_creation_input_tokens input_tokens total_duration load_duration "
    "prompt_eval_duration eval_duration index call_id accepted_prediction_tokens "
    "rejected_prediction_tokens".split()
)
# These come in pieces. Of the others the last value counts; one that comes twice is found in these.
GROWING = frozenset(
    "text content reasoning_content reasoning thinking arguments partial_json delta response name "
    "finish_reason stop_reason done_reason".split()
)
# The model's template, in which it may call tools and reasons if it is asked to.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "Call <tool_call>{...}</tool_call>\n{% endif %}{% for message in messages %}"
    "{{ message.role }}: {{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is defined %}<think>\n"
    "{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "Count to a hundred"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 80, "maxLength": 160}},
            "required": ["city"],
        },
    },
}
CALLS = {
    "tools": [TOOL],
    "tool_choice": "required",
    "chat_template_kwargs": {"enable_thinking": False},
}
REGEX = {"regex": "[a-z ]{40,200}"}
# What the last line of a stream has, of one API or another; an error is an end, too.
ENDS = (
    b"[DONE]",
    b"response.completed",
    b"response.incomplete",
    b"message_stop",
    b'"done":true',
    b'"error"',
    b"response.failed",
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Answer: TypeAlias = dict[tuple[Any, ...], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request: its path, and what is particular in its body."""

    name: str
    path: str
    body: Mapping[str, Any]

    @property
    def streams(self) -> bool:
        """Whether the answer comes in events."""
        return bool(self.body.get("stream"))

    def request(self, model: str, number: int, num_tokens: int) -> dict[str, Any]:
        """Return the body of a numbered request, whose answer follows from it."""
        body: dict[str, Any] = {"model": model, **self.body}
        if self.path.startswith("/api/"):
            return body | {"options": {"seed": number, "num_predict": num_tokens}}
        if self.path in (CHAT, COMPLETIONS):
            body |= {"max_tokens": num_tokens, "seed": number, "ignore_eos": True}
            if self.streams:
                body["stream_options"] = {"include_usage": True}
        elif self.path == "/v1/responses":
            body |= {"max_output_tokens": num_tokens, "seed": number, "store": False}
        elif self.path == "/v1/messages":
            body |= {"max_tokens": num_tokens, "seed": number}
        return body


def _chat(name: str, **body: Any) -> Kind:
    return Kind(name, CHAT, {"messages": USER, **body})


def _completion(name: str, **body: Any) -> Kind:
    return Kind(name, COMPLETIONS, {"prompt": "Count to a hundred", **body})


KINDS = (
    _completion("completion, streamed", stream=True),
    _completion("completion", prompt="A short question. " * 40),
    _completion("two choices with logprobs", stream=True, n=2, logprobs=2),
    _completion("two prompts, echoed", prompt=["One", "Two"], echo=True, logprobs=1),
    _completion("guided by a regex", structured_outputs=REGEX),
    _completion("guided, streamed", structured_outputs=REGEX, stream=True),
    _completion("stop string", stop=["zz never zz"], stream=True),
    _completion("prompt logprobs", prompt="Early in the morning. " * 30, prompt_logprobs=1),
    _completion("a body of 300 kB", prompt="Once more. " * 20, user="x" * 300_000, stream=True),
    _chat("chat, streamed", stream=True, logprobs=True, top_logprobs=2),
    _chat("three choices", n=3),
    _chat("tools, streamed", **CALLS, stream=True),
    _chat("tools", **CALLS),
    _chat("reasoning", chat_template_kwargs={"enable_thinking": True}, stream=True),
    Kind("Responses, streamed", "/v1/responses", {"input": "Count to ten", "stream": True}),
    Kind("Responses", "/v1/responses", {"input": "Count to ten"}),
    Kind("Messages, streamed", "/v1/messages", {"messages": USER, "stream": True}),
    Kind("Messages", "/v1/messages", {"messages": USER}),
    Kind("Ollama, streamed", "/api/chat", {"messages": USER, "stream": True}),
    Kind("Ollama, generate", "/api/generate", {"prompt": "Count", "stream": False}),
    Kind("/tokenize", "/tokenize", {"prompt": "The quick brown fox. " * 2000}),
    Kind("/detokenize", "/detokenize", {"tokens": list(range(300, 400)) * 50}),
    Kind("embeddings", "/v1/embeddings", {"input": ["One", "Two", "Three " * 500]}),
)


def prepare_folder(folder: Path) -> Path:
    """Give a model's folder the template that the requests are meant for, and let it embed."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": number, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


class Ask:
    """One request, sent and read by a thread of its own.

    `failure` says how it failed, after it has ended. `marks_s` are the times at which something of
    the answer came.
    """

    def __init__(
        self, port: int, kind: Kind, number: int, num_tokens: int, model: str = "sim"
    ) -> None:
        self.kind = kind
        self.number = number
        self.failure = ""
        self.began_s = time.monotonic()
        self.ended_s = 0.0
        self.marks_s: list[float] = []
        self._lines: list[bytes] = []
        self._status = 0
        self._body = json.dumps(kind.request(model, number, num_tokens)).encode()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Whether its stream is well on its way; one that is not streamed always is."""
        return not self.kind.streams or len(self.marks_s) > 5 or self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return not self._thread.is_alive()

    @property
    def num_tokens(self) -> int:
        """At least so many tokens have come of each of its choices; 0 until it ends if it is not
        streamed."""
        return len(self.marks_s) // int(self.kind.body.get("n", 1)) if self.kind.streams else 0

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two events of its stream; 0 if it has none."""
        pairs = zip(self.marks_s, self.marks_s[1:], strict=False)
        return max((later - former for former, later in pairs), default=0.0)

    def _read(self) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", self.kind.path, self._body, headers)
            answer = self._connection.getresponse()
            self._status = answer.status
            for line in answer:
                if line != b"\n" and not line.startswith((b":", b"event: ")):
                    self.marks_s.append(time.monotonic())
                    self._lines.append(line)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failure = repr(error)
        finally:
            self._connection.close()
            self.ended_s = time.monotonic()

    def leave(self) -> None:
        """Close the connection, whatever comes."""
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def answer(self) -> Answer:
        """Wait for the end; return what must be the same without a fault. `failure` is then set."""
        self._thread.join(TIMEOUT_S)
        if not self.has_ended:
            self.failure = f"hangs after {len(self._lines)} lines"
            return {}
        found: Answer = {}
        for event in self._events():
            if "error" in event and event["error"] is not None:
                self.failure = str(event)[:300]
                continue
            fold(found, (event.get("type"),), event)
        if self._status != 200 and not self.failure:
            self.failure = f"status {self._status}: {b''.join(self._lines)[:300]!r}"
        return found

    def _events(self) -> list[dict[str, Any]]:
        """Parse what came; a stream must have its end."""
        lines = list(self._lines)
        try:
            if not self.kind.streams or self._status != 200:
                return [json.loads(b"".join(lines))]
            if not self.kind.path.startswith("/api/"):
                lines = [line.removeprefix(b"data: ") for line in lines]
            if not (lines and any(end in lines[-1] for end in ENDS)) and not self.failure:
                self.failure = "the stream broke off before its end"
            if lines[-1:] == [b"[DONE]\n"]:
                lines.pop()
            return [json.loads(line) for line in lines]
        except ValueError:
            self.failure = self.failure or f"no JSON: {b''.join(self._lines)[-200:]!r}"
            return []


def fold(found: Answer, path: tuple[Any, ...], value: Any) -> None:
    """Add a value to what is known at its path: pieces to pieces, items to lists."""
    if isinstance(value, dict):
        if isinstance(index := value.get("index"), int):
            path = (*path, index)
        for key, inner in value.items():
            if key not in VOLATILE:
                fold(found, (*path, key), inner)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and "index" in item:
                fold(found, path, item)
            else:
                found.setdefault(path, []).append(_scrubbed(item))
    elif isinstance(value, str) and path[-1] in GROWING:
        found[path] = found.get(path, "") + value
    elif value is not None:
        found[path] = value


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrubbed(inner) for key, inner in value.items() if key not in VOLATILE}
    return [_scrubbed(inner) for inner in value] if isinstance(value, list) else value


@dataclass(slots=True)
class Difference:
    """What an answer lacks, has twice or has otherwise: characters of texts, entries of lists."""

    num_lost: int = 0
    num_doubled: int = 0
    num_altered: int = 0
    where: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.where)

    def add(self, other: Difference) -> None:
        """Add what another answer lacks, has twice or has otherwise."""
        self.num_lost += other.num_lost
        self.num_doubled += other.num_doubled
        self.num_altered += other.num_altered
        self.where += other.where


def difference(expected: Answer, found: Answer) -> Difference:
    """Compare an answer with that of a run without a fault."""
    total = Difference()
    for path in expected.keys() | found.keys():
        was, now = expected.get(path), found.get(path)
        if was == now:
            continue
        name = ".".join(str(part) for part in path if part is not None)
        total.where.append(f"{name}: {_short(now)} instead of {_short(was)}")
        empty: Any = "" if isinstance(was if now is None else now, str) else []
        was, now = (empty if each is None else each for each in (was, now))
        if isinstance(was, (str, list)) and isinstance(now, type(was)):
            _count(total, was, now)
        else:
            total.num_altered += 1
    return total


def _count(total: Difference, was: Sequence[Any], now: Sequence[Any]) -> None:
    if not isinstance(was, str):  # entries of logprobs are dicts, which cannot be keys
        was, now = list(map(repr, was)), list(map(repr, now))
    matcher = difflib.SequenceMatcher(None, was, now, autojunk=False)
    for what, begin, end, now_begin, now_end in matcher.get_opcodes():
        if what == "delete":
            total.num_lost += end - begin
        elif what == "insert":
            total.num_doubled += now_end - now_begin
        elif what == "replace":
            total.num_altered += max(end - begin, now_end - now_begin)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:40]}…{text[-30:]} ({len(text)})"
