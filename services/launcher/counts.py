"""How many processes of each service are launched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """How many processes of each service."""

    router: int = 1
    tokenizer: int = 1
    compute: int = 1
    detokenizer: int = 1

    def names(self, service: str) -> tuple[str, ...]:
        """Return the names of one service's instances."""
        return tuple(f"{service}-{index}" for index in range(getattr(self, service)))
