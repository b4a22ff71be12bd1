"""Settings of the detokenizer service."""

from __future__ import annotations

from pydantic import Field

from common.config import GRACE, Settings


class DetokenizerSettings(Settings):
    """The `[detokenizer]` table."""

    # Decoding so many takes some 30 ms.
    max_query_ids: int = Field(262_144, description="token ids of one /detokenize")
    grace_s: float = Field(30.0, description=GRACE)
