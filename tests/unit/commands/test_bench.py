"""What `slipstream bench` asks of servers that differ, and how it shows what came of it."""

from __future__ import annotations

from typing import Any

import pytest

from services.bench.figures import Figures, Spread
from services.bench.workloads import WORKLOADS, BenchRequest
from services.commands.bench import COMMANDS, Bench, report
from services.commands.server import Api, ServerError


class Server(Api):
    """A server that answers `/tokenize` with this, or refuses."""

    def __init__(self, tokenized: dict[str, Any] | None, api_key: str = "") -> None:
        super().__init__("https://gpu.example/llm/v1", api_key)
        self._tokenized = tokenized

    def call(self, method: str, path: str, body: Any = None) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "model"}]}
        if self._tokenized is None:
            raise ServerError("Not Found (status 404)", 404)
        return self._tokenized


def requests_to(server: Server, *words: str) -> list[BenchRequest]:
    options = COMMANDS["bench"].parser("bench").parse(words)
    return Bench(server, options)._requests(WORKLOADS["A"])


def test_prompts_are_ids_that_the_server_knows() -> None:
    requests = requests_to(Server({"tokens": [5, 3, 5], "max_model_len": 4096}))
    assert {token for request in requests for token in request.prompt_ids} == {3, 5}
    assert [
        (len(request.prompt_ids), request.max_tokens, request.text) for request in requests
    ] == [(128, 512, "")] * 4


def test_a_server_that_tells_no_ids_gets_words() -> None:
    requests = requests_to(Server(None))
    assert [len(request.text.split()) for request in requests] == [128] * 4


def test_lengths_are_cut_to_a_short_context() -> None:
    requests = requests_to(Server({"tokens": [1], "max_model_len": 100}))
    assert {(len(request.prompt_ids), request.max_tokens) for request in requests} == {(49, 49)}


def test_requests_go_to_the_address_with_its_path_and_key() -> None:
    options = COMMANDS["bench"].parser("bench").parse([])
    request = Bench(Server(None, "sesame"), options)._endpoint().post("/v1/completions", {})
    head = request.decode().split("\r\n")
    assert head[0] == "POST /llm/v1/completions HTTP/1.1"
    assert {"Host: gpu.example:443", "Authorization: Bearer sesame"} <= set(head)


def test_a_model_that_is_not_served_is_refused_with_those_that_are() -> None:
    with pytest.raises(ServerError, match="serves no other; it serves model"):
        requests_to(Server(None), "--model", "other")


def test_a_client_that_was_too_slow_is_named() -> None:
    figures = Figures(
        num_requests=4,
        num_failed=1,
        wall_s=2.0,
        prompt_tokens=512,
        output_tokens=1000,
        cached_tokens=16,
        num_events=900,
        ttft=Spread(0.01, 0.01, 0.02, 1234.5),
        itl=Spread(),
        tpot=Spread(),
        latency=Spread(),
        client_share=0.95,
        client_cpu_per_token_s=1e-3,
        problems=("1 requests failed (request 3: lost)",),
    )
    text = report(figures)
    assert "2.0 a second; 1 failed" in text
    assert "1,000 written, 500 a second" in text
    assert "512 read, 16 of them from its cache" in text
    assert "The clients were 95% busy" in text
    assert text.endswith("1 requests failed (request 3: lost)")
    assert max(map(len, text.splitlines())) <= 80
