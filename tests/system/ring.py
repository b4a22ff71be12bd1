"""What the system tests ask of a running ring besides its API."""

from __future__ import annotations

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
