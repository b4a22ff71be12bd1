"""How many processes of each service run, for whoever may change that while they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from common.config import SERVICE_TABLES
from common.errors import SlipstreamError, near

MAX_PROCESSES = 256  # of one service of one deployment


class ScaleError(SlipstreamError):
    """A count that cannot be: why, and what to do, in a sentence for the user."""


class Replicas(Protocol):
    """The processes of one deployment, wherever they were placed."""

    def count(self, service: str) -> int:
        """Return how many processes of a service there are to be."""

    async def scale(self, service: str, count: int) -> None:
        """Begin to start what lacks, or to drain what is too much; ScaleError if it cannot be.

        It does not wait until they serve or have ended.
        """


def service_named(text: str) -> str:
    """Return the service that a user means, `computes` being `compute`; ScaleError."""
    service = text.strip().removesuffix("s")
    if service not in SERVICE_TABLES:
        known = ", ".join(SERVICE_TABLES)
        raise ScaleError(f"there is no service {text!r}{near(text, SERVICE_TABLES)} ({known})")
    return service


def check_count(service: str, count: int) -> None:
    """Raise ScaleError for a count that no deployment can have."""
    fewest = 0 if service == "compute" else 1  # without compute, requests are held
    if not fewest <= count <= MAX_PROCESSES:
        raise ScaleError(f"{service}: from {fewest} to {MAX_PROCESSES} are possible, not {count}")


def counts_of(replicas: Replicas) -> Mapping[str, int]:
    return {service: replicas.count(service) for service in SERVICE_TABLES}
