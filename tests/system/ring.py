"""What the system tests ask of a running ring besides its API."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S


def is_empty(stack: Stack) -> bool:
    """Whether no table of any service has an entry and no page is in use."""
    health = stack.health()
    instances = health["instances"]
    return (
        not (health["requests"] or health["attempts"] or health["queries"])
        and len(instances) >= 3
        and not any(
            each["open"] or each["num_running"] or each["num_waiting"] or each["kv_usage"]
            for each in instances
        )
    )


def wait_empty(stack: Stack) -> None:
    """Wait until all tables of all services are empty."""
    stack.wait_until(lambda: is_empty(stack), PATIENCE_S, f"empty: {stack.health()}")


def num_running(stack: Stack, service: str = "compute") -> list[int]:
    """Return how many requests run at each instance of a service, by its last heartbeat."""
    instances = stack.health()["instances"]
    return [each["num_running"] for each in instances if each["service"] == service]


def num_steps(stack: Stack) -> int:
    """Return how many steps the engines have made, by their last heartbeats."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    counts = re.findall(r"^slipstream_compute_steps_total{.*} (\d+)\.0$", text, re.M)
    return sum(map(int, counts))


def send(
    stack: Stack,
    method: str,
    path: str,
    body: bytes = b"",
    content_type: str = "application/json",
    headers: dict[str, str] | None = None,
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send bytes as they are; returns status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, {"Content-Type": content_type, **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def ask(stack: Stack, num_tokens: int = 1) -> tuple[int, http.client.HTTPMessage]:
    """Send one small request; returns status and headers."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    try:
        body = {"model": "sim", "prompt": "Hi", "max_tokens": num_tokens}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers
    finally:
        connection.close()


def answers(stack: Stack) -> bool:
    """Whether a request is served now; a connection that breaks means no."""
    try:
        return ask(stack)[0] == 200
    except (OSError, http.client.HTTPException):
        return False
