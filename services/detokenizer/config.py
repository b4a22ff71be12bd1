"""Settings of the detokenizer service."""

from __future__ import annotations

from common.config import Settings


class DetokenizerSettings(Settings):
    """The `[detokenizer]` table."""

    max_query_ids: int = 262_144  # ids of one /detokenize; decoding them takes some 30 ms
    grace_s: float = 30.0
