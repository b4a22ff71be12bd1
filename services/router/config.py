"""Settings of the router service."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from common.config import Settings

AUTO_ORIGINS: Final = ("auto",)


class RouterSettings(Settings):
    """The `[router]` table. Zero switches a per-client limit off."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)  # 0 picks a free one
    api_keys: tuple[str, ...] = ()  # none, and no file of them: everybody may ask
    api_keys_file: str = ""  # more keys, with limits of their own; read again when it changes
    allowed_origins: tuple[str, ...] = AUTO_ORIGINS  # of pages; auto: all on loopback without keys
    placement: Literal["round_robin", "least_load"] = "least_load"
    unknown_fields: Literal["warn", "refuse"] = "warn"  # what a request has that nobody reads

    max_body_bytes: int = Field(8 << 20, ge=1024)  # 8 MiB parse in 80 ms, which stops the loop
    body_timeout_s: float = Field(30.0, gt=0)  # for a client to send its request
    keep_alive_s: float = Field(75.0, gt=0)
    query_timeout_s: float = Field(30.0, gt=0)  # for /tokenize and /detokenize

    max_in_flight: int = Field(1024, ge=1)  # requests
    max_in_flight_tokens: int = Field(16 << 20, ge=1)  # prompts (estimated) and what they may make
    max_in_flight_per_client: int = Field(0, ge=0)
    requests_per_s_per_client: float = Field(0.0, ge=0)
    tokens_per_minute_per_client: int = Field(0, ge=0)

    slow_client_buffer_bytes: int = Field(256 << 10, ge=4096)  # unsent; beyond it deltas merge
    slow_client_max_bytes: int = Field(4 << 20, ge=4096)  # merged; beyond it the client is dropped
    slow_client_timeout_s: float = Field(30.0, gt=0)  # behind for longer, the client is dropped

    responses_max: int = Field(1000, ge=0)  # that are kept for previous_response_id; 0: none
    responses_max_bytes: int = Field(64 << 20, ge=1 << 20)  # of them all, about
    responses_ttl_s: float = Field(3600.0, gt=0)

    lease_s: float = Field(2.0, gt=0)  # a worker that was not heard of for longer is gone
    grace_s: float = Field(30.0, ge=0)
