"""Wrong requests, one a line: what is sent, and the status, code and field that must come back.

`WRONG` has them in groups. They are meant for the server of `strict_stack`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL = "strict"
MAX_BODY_BYTES = 1 << 18
VOCABULARY = 512

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSE = "/v1/responses/resp_1"
RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
EMBEDDINGS, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
SOUND: Mapping[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [USER], "max_tokens": 8},
    TEXT: {"model": MODEL, "prompt": "Hi", "max_tokens": 8},
    RESPONSES: {"model": MODEL, "input": "Hi", "max_output_tokens": 16},
    INPUT_TOKENS: {"model": MODEL, "input": "Hi"},
    MESSAGES: {"model": MODEL, "messages": [USER], "max_tokens": 8},
    COUNT: {"model": MODEL, "messages": [USER]},
    EMBEDDINGS: {"model": MODEL, "input": "Hi"},
    TOKENIZE: {"prompt": "Hi"},
    DETOKENIZE: {"tokens": [72, 105]},
}
INVALID, MISSING = "invalid_value", "missing_required_parameter"
UNSUPPORTED = "unsupported_parameter"
TOO_LONG, NO_JSON = "context_length_exceeded", "invalid_json"
JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class Wrong:
    """One wrong request and what must come back; a body that is an object is sent as JSON."""

    name: str
    path: str
    body: bytes | dict[str, Any]
    where: str | None = None
    code: str = INVALID
    status: int = 400
    method: str = "POST"
    content_type: str = JSON_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def sent(self) -> bytes:
        """The body as bytes."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def wrong(
    path: str, name: str, change: dict[str, Any], where: str | None, code: str = INVALID
) -> Wrong:
    """Change a sound body; a field that is changed to `...` is left out."""
    body = {key: value for key, value in (SOUND[path] | change).items() if value is not ...}
    return Wrong(f"{path.rpartition('/')[2]}: {name}", path, body, where, code)


def chat(name: str, change: dict[str, Any], where: str, code: str = INVALID) -> Wrong:
    """Change a sound chat request."""
    return wrong(CHAT, name, change, where, code)


def text(name: str, change: dict[str, Any], where: str, code: str = INVALID) -> Wrong:
    """Change a sound completion request."""
    return wrong(TEXT, name, change, where, code)


def broken(name: str, body: bytes, path: str = TEXT) -> Wrong:
    """Send what is no JSON object."""
    return Wrong(name, path, body, None, NO_JSON)


def said(*messages: Any) -> dict[str, Any]:
    """Have other messages."""
    return {"messages": list(messages)}


def nested(depth: int) -> Any:
    """Make an array in an array in an array."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


_GOOD = json.dumps(SOUND[TEXT]).encode()

BODIES = [
    broken("no body", b""),
    broken("only blanks", b"  \n "),
    broken("malformed", b'{"model": "strict", "prompt": "Hi"'),
    broken("trailing comma", b'{"model": "strict", "prompt": "Hi",}'),
    broken("single quotes", b"{'model': 'strict'}"),
    broken("a comment", b'{"model": "strict" /* me */}'),
    broken("two documents", _GOOD + _GOOD),
    broken("garbage behind", _GOOD + b"\x00"),
    broken("an array", b"[" + _GOOD + b"]"),
    broken("a string", b'"Hi"'),
    broken("null", b"null"),
    broken("a number", b"1e3"),
    broken("NaN", b'{"model": "strict", "prompt": "Hi", "temperature": NaN}'),
    broken("Infinity", b'{"model": "strict", "prompt": "Hi", "temperature": Infinity}'),
    broken("1e999", b'{"model": "strict", "prompt": "Hi", "temperature": 1e999}'),
    broken("5,000 digits", b'{"model": "strict", "prompt": "Hi", "seed": ' + b"9" * 5000 + b"}"),
    broken("duplicate keys", b'{"model": "strict", "model": "strict", "prompt": "Hi"}'),
    broken("duplicate keys inside", b'{"prompt": "Hi", "stop": {"a": 1, "a": 2}}'),
    broken("duplicate keys by escapes", b'{"prompt": "Hi", "\\u0070rompt": "Ho"}'),
    broken("lone surrogate", b'{"model": "strict", "prompt": "\\ud800"}'),
    broken("lone low surrogate", b'{"model": "strict", "prompt": "a\\udc00b"}'),
    broken("surrogate as a key", b'{"model": "strict", "prompt": "Hi", "\\uD83D": 1}'),
    broken("surrogates as UTF-8", b'{"model": "strict", "prompt": "\xed\xa0\x80"}'),
    broken("invalid UTF-8", b'{"model": "strict", "prompt": "\xff\xfe"}'),
    broken("overlong UTF-8", b'{"model": "strict", "prompt": "\xc0\x80"}'),
    broken("cut UTF-8", b'{"model": "strict", "prompt": "\xe6\x9d"}'),
    broken("latin-1", '{"model": "strict", "prompt": "é"}'.encode("latin-1")),
    broken("a BOM", b"\xef\xbb\xbf" + _GOOD),
    broken("UTF-16", _GOOD.decode().encode("utf-16")),
    broken("UTF-32", _GOOD.decode().encode("utf-32")),
    broken("a raw control character", b'{"model": "strict", "prompt": "a\x00b"}'),
    broken("65 levels", json.dumps({"model": MODEL, "prompt": nested(64)}).encode()),
    broken("100,000 levels", b'{"a":' * 40_000 + b"1" + b"}" * 40_000),
    broken("100,000 brackets", b"[" * 200_000),
    broken("a half number", b'{"model": "strict", "prompt": "Hi", "temperature": 1.}'),
    broken("leading zeros", b'{"model": "strict", "prompt": "Hi", "max_tokens": 007}'),
    *(
        broken(f"{path}: not JSON", b"{", path)
        for path in (CHAT, RESPONSES, INPUT_TOKENS, EMBEDDINGS, TOKENIZE, DETOKENIZE)
    ),
]


def typed(name: str, content_type: str, code: int = 415, **headers: str) -> Wrong:
    """Send a sound body under another name."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return Wrong(
        name, TEXT, _GOOD, None, "unsupported_media_type", code, "POST", content_type, named
    )


_LARGE = Wrong("too large", TEXT, b"x" * (MAX_BODY_BYTES + 1), None, "request_too_large", 413)

TYPES = [
    typed("text/plain", "text/plain"),
    typed("a form", "application/x-www-form-urlencoded"),
    typed("multipart", "multipart/form-data; boundary=x"),
    typed("XML", "application/xml"),
    typed("no content type", ""),
    typed("a broken content type", ";;;=,"),
    typed("a long content type", "x" * 4000),
    typed("gzip", JSON_TYPE, Content_Encoding="gzip"),
    typed("deflate", JSON_TYPE, Content_Encoding="deflate"),
    typed("br", JSON_TYPE, Content_Encoding="br"),
    typed("zstd", JSON_TYPE, Content_Encoding="zstd"),
    typed("two encodings", JSON_TYPE, Content_Encoding="identity, gzip"),
    typed("charset=utf-16", "application/json; charset=utf-16"),
    typed("an unknown charset", "application/json; charset=wibble"),
    _LARGE,
]


def routed(method: str, path: str, status: int) -> Wrong:
    """Ask where nothing is, or in a way that is not meant."""
    code = {404: "not_found", 405: "method_not_allowed"}[status]
    return Wrong(f"{method} {path}", path, b"", None, code, status, method)


PATHS = [
    routed("GET", "/v2/what", 404),
    routed("POST", "/v1", 404),
    routed("POST", "/v1/chat/completions/", 404),
    routed("POST", "//v1/chat/completions", 404),
    routed("GET", "/v1/%2e%2e/health", 404),
    routed("GET", "/page/../../../../etc/passwd", 404),
    routed("GET", "/page/%2e%2e/%2e%2e/actor.py", 404),
    routed("GET", "/page/..%2f..%2factor.py", 404),
    routed("GET", "/page/%00", 404),
    routed("GET", CHAT, 405),
    routed("HEAD", CHAT, 405),
    routed("OPTIONS", CHAT, 405),
    routed("PUT", MESSAGES, 405),
    routed("DELETE", RESPONSES, 405),
    routed("PATCH", EMBEDDINGS, 405),
    routed("POST", "/v1/models", 405),
    routed("POST", "/health", 405),
    routed("POST", "/timeline", 405),
    Wrong("an unknown model", "/v1/models/gpt-9", b"", "model", "model_not_found", 404, "GET"),
    Wrong("a long model", "/v1/models/" + "x" * 3000, b"", "model", "model_not_found", 404, "GET"),
    *(
        Wrong(f"{method} {below}", RESPONSE + below, b"", None, "response_not_found", 404, method)
        for method, below in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
        )
    ),
    routed("POST", "/v1/responses/compact", 404),
    *(
        Wrong(f"seconds={value}", f"/timeline?seconds={value}", b"", "seconds", method="GET")
        for value in ("0", "-1", "nan", "inf", "1e99", "601", "x", "%00")
    ),
]

SAMPLING = [
    row
    for path in (CHAT, TEXT)
    for row in (
        wrong(path, "another type of model", {"model": ["strict"]}, "model"),
        wrong(path, "a long model", {"model": "x" * 600}, "model"),
        wrong(path, "temperature below 0", {"temperature": -1}, "temperature"),
        wrong(path, "temperature 10**7", {"temperature": 1e7}, "temperature"),
        wrong(path, "temperature as text", {"temperature": "0.5"}, "temperature"),
        wrong(path, "temperature as a huge number", {"temperature": 10**400}, "temperature"),
        wrong(path, "temperature true", {"temperature": True}, "temperature"),
        wrong(path, "top_p 0", {"top_p": 0}, "top_p"),
        wrong(path, "top_p 1.5", {"top_p": 1.5}, "top_p"),
        wrong(path, "top_k -5", {"top_k": -5}, "top_k"),
        wrong(path, "top_k 2**40", {"top_k": 1 << 40}, "top_k"),
        wrong(path, "min_p 2", {"min_p": 2}, "min_p"),
        wrong(path, "presence_penalty 9", {"presence_penalty": 9}, "presence_penalty"),
        wrong(path, "repetition_penalty 0", {"repetition_penalty": 0}, "repetition_penalty"),
        wrong(path, "max_tokens 0", {"max_tokens": 0}, "max_tokens"),
        wrong(path, "max_tokens -1", {"max_tokens": -1}, "max_tokens"),
        wrong(path, "max_tokens 8.5", {"max_tokens": 8.5}, "max_tokens"),
        wrong(path, "max_tokens 10**12", {"max_tokens": 10**12}, "max_tokens"),
        wrong(path, "min over max tokens", {"min_tokens": 9}, "min_tokens"),
        wrong(path, "seed 2**64", {"seed": 1 << 64}, "seed"),
        wrong(path, "seed 4,000 digits", {"seed": 10**4000}, "seed"),
        wrong(path, "n 0", {"n": 0}, "n"),
        wrong(path, "n a million", {"n": 1_000_000}, "n"),
        wrong(path, "best_of 20", {"best_of": 20}, "best_of", UNSUPPORTED),
        wrong(path, "best_of a million", {"best_of": 1_000_000}, "best_of"),
        wrong(path, "999 stops", {"stop": ["a"] * 999}, "stop"),
        wrong(path, "stops like a book", {"stop": [f"{at:0999}" for at in range(99)]}, "stop"),
        wrong(path, "a long stop", {"stop": "a" * 2000}, "stop"),
        wrong(path, "an empty stop", {"stop": [""]}, "stop[0]"),
        wrong(path, "a stop in an array", {"stop": [["a"]]}, "stop[0]"),
        wrong(path, "stop id at the end", {"stop_token_ids": [VOCABULARY]}, "stop_token_ids[0]"),
        wrong(path, "stop id -1", {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        wrong(path, "stop id true", {"stop_token_ids": [True]}, "stop_token_ids[0]"),
        wrong(path, "600 stop ids", {"stop_token_ids": list(range(600))}, "stop_token_ids"),
        wrong(path, "bias at the end", {"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
        wrong(path, "bias of a name", {"logit_bias": {"a": 1}}, "logit_bias"),
        wrong(path, "bias of 1.5", {"logit_bias": {"1.5": 1}}, "logit_bias"),
        wrong(path, "bias of other digits", {"logit_bias": {"٣": 1}}, "logit_bias"),
        wrong(path, "bias of 10**9", {"logit_bias": {"5": 1e9}}, "logit_bias"),
        wrong(
            path, "5,000 biases", {"logit_bias": {str(at): 1 for at in range(5000)}}, "logit_bias"
        ),
        wrong(
            path,
            "allowed id at the end",
            {"allowed_token_ids": [VOCABULARY]},
            "allowed_token_ids[0]",
        ),
        wrong(path, "no id allowed", {"allowed_token_ids": []}, "allowed_token_ids"),
        wrong(path, "500 bad words", {"bad_words": ["a"] * 500}, "bad_words"),
        wrong(path, "prompt_logprobs 9999", {"prompt_logprobs": 9999}, "prompt_logprobs"),
        wrong(path, "stream as text", {"stream": "true"}, "stream"),
        wrong(path, "options, no stream", {"stream_options": {}}, "stream_options"),
        wrong(path, "priority 2**40", {"priority": 1 << 40}, "priority"),
        wrong(path, "a long cache_salt", {"cache_salt": "x" * 300}, "cache_salt"),
        wrong(path, "a request_id of numbers", {"request_id": [5]}, "request_id"),
        wrong(path, "beam search", {"use_beam_search": True}, "use_beam_search", UNSUPPORTED),
        wrong(path, "guided_json", {"guided_json": {}}, "guided_json", UNSUPPORTED),
        wrong(path, "a chat template", {"chat_template": "{{ 1 }}"}, "chat_template", UNSUPPORTED),
        wrong(path, "an adapter", {"lora_path": "/etc/passwd"}, "lora_path", UNSUPPORTED),
        wrong(path, "a pickle", {"prompt_embeds": "gASVAAAA"}, "prompt_embeds", UNSUPPORTED),
        wrong(
            path,
            "a processor",
            {"logits_processors": ["os.system"]},
            "logits_processors",
            UNSUPPORTED,
        ),
    )
]

PROMPTS = [
    text("no prompt", {"prompt": ...}, "prompt", MISSING),
    text("empty", {"prompt": ""}, "prompt", "empty_string"),
    text("no prompts", {"prompt": []}, "prompt", "empty_array"),
    text("a number", {"prompt": 5}, "prompt"),
    text("mixed", {"prompt": ["a", [1]] + [None]}, "prompt[2]"),
    text("id -1", {"prompt": [1, -1]}, "prompt[1]"),
    text("id at the end", {"prompt": [1, VOCABULARY]}, "prompt[1]"),
    text("id in the second", {"prompt": [[1], [VOCABULARY]]}, "prompt[1][0]"),
    text("id 2**31", {"prompt": [1 << 31]}, "prompt[0]"),
    text("id 2**64", {"prompt": [1 << 64]}, "prompt[0]"),
    text("id 1.0", {"prompt": [1, 1.0]}, "prompt[1]"),
    text("id true", {"prompt": [1, True]}, "prompt[1]"),
    text("5,000 prompts", {"prompt": ["a"] * 5000}, "prompt"),
    text("1,000 prompts x 100", {"prompt": ["a"] * 1000, "n": 100}, "n"),
    text("too long a text", {"prompt": "word " * 40_000}, "prompt", TOO_LONG),
    text("too many ids", {"prompt": [5] * 20_000}, "prompt", TOO_LONG),
    text(
        "the second too long",
        {"prompt": ["a", "b " * 30_000], "stream": False},
        "prompt[1]",
        TOO_LONG,
    ),
    text("no room", {"prompt": [5] * 8192, "max_tokens": 1000}, "prompt", TOO_LONG),
    text("logprobs 9999", {"logprobs": 9999}, "logprobs"),
    text("logprobs of all", {"logprobs": 20, "n": 128, "max_tokens": 8000}, "max_tokens"),
    text("suffix", {"suffix": "x"}, "suffix", UNSUPPORTED),
    text("messages", said(USER), "messages", UNSUPPORTED),
    text("echo of a wrong id", {"prompt": [VOCABULARY], "echo": True}, "prompt[0]"),
    text(
        "echo alone, too long",
        {"prompt": [5] * 9000, "echo": True, "max_tokens": 0},
        "prompt",
        TOO_LONG,
    ),
]

BYTES = {"bodies": BODIES, "content types": TYPES, "paths": PATHS}
FIELDS = {"sampling": SAMPLING, "prompts": PROMPTS}
