"""Settings of the router service."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from common.config import GRACE, Settings

AUTO_ORIGINS: Final = ("auto",)


class RouterSettings(Settings):
    """The `[router]` table; 0 switches a limit per client off."""

    host: str = Field("127.0.0.1", description="where to listen; 0.0.0.0 is every address")
    port: int = Field(8000, ge=0, le=65535, description="port of the API; 0 picks a free one")
    api_keys: tuple[str, ...] = Field(
        (), description="clients have to send one of them; without any, everybody may ask"
    )
    api_keys_file: str = Field(
        "", description="a file with more keys and their limits; it is read again when it changes"
    )
    metrics_token: str = Field(
        "", description="lets a scraper read /metrics and /health, and nothing else, without a key"
    )
    allowed_origins: tuple[str, ...] = Field(
        AUTO_ORIGINS,
        description="origins of pages that may ask; auto is this machine's on loopback without "
        "keys",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="names that clients may call the server by, * for any (default: this "
        "machine's on loopback, else any)",
    )
    placement: Literal["round_robin", "least_load"] = Field(
        "least_load", description="which worker gets the next request"
    )
    unknown_fields: Literal["warn", "refuse"] = Field(
        "warn", description="what to do about a field of a request that does not exist"
    )

    max_body_bytes: int = Field(8 << 20, ge=1024, description="size of one request")
    max_unfinished_body_bytes: int = Field(
        64 << 20,
        ge=1 << 20,
        description="size of all requests that arrive or are parsed, but for 64 KiB of each",
    )
    body_timeout_s: float = Field(30.0, gt=0, description="for a client to send its request")
    keep_alive_s: float = Field(75.0, gt=0, description="until an idle connection is closed")
    query_timeout_s: float = Field(30.0, gt=0, description="for /tokenize and /detokenize")

    max_in_flight: int = Field(1024, ge=1, description="open requests; more are refused")
    max_in_flight_tokens: int = Field(
        16 << 20, ge=1, description="tokens of open requests: prompts (estimated) and max_tokens"
    )
    max_in_flight_choices: int = Field(
        2048, ge=1, description="answers of open requests: prompts times n; more are refused"
    )
    max_in_flight_per_client: int = Field(0, ge=0, description="open requests of one client")
    requests_per_s_per_client: float = Field(0.0, ge=0, description="requests a second of one")
    tokens_per_minute_per_client: int = Field(0, ge=0, description="tokens a minute of one")
    min_priority: int = Field(
        0,
        le=0,
        description="most urgent priority that a client may ask for; lower numbers go first",
    )

    slow_client_buffer_bytes: int = Field(
        256 << 10, ge=4096, description="unsent bytes from which on deltas are merged"
    )
    slow_client_max_bytes: int = Field(
        4 << 20, ge=4096, description="merged bytes from which on a client is dropped"
    )
    slow_client_timeout_s: float = Field(
        30.0, gt=0, description="until a client that does not keep up is dropped"
    )

    responses_max: int = Field(1000, ge=0, description="responses kept for previous_response_id")
    responses_max_bytes: int = Field(64 << 20, ge=1 << 20, description="size of all of them")
    responses_ttl_s: float = Field(3600.0, gt=0, description="how long each is kept")

    lease_s: float = Field(
        2.0, gt=0, description="a worker that has been silent for longer is taken for dead"
    )
    hold_s: float = Field(
        10.0, ge=0, description="how long a request waits for a worker while there is none for it"
    )
    load_s: float = Field(
        300.0,
        ge=0,
        description="how long a request waits, if longer, while compute loads its model",
    )
    wake_s: float = Field(
        0.0,
        ge=0,
        description="how long a request waits, if longer, for a model that is asleep; above 0 only "
        "where something starts compute when requests wait: then a router is ready for them, too",
    )
    max_wait_s: float = Field(
        0.0,
        ge=0,
        description="how long a request may be without its first token, then it is refused; 0 is "
        "for ever, as clients have timeouts of their own and a batch may wait",
    )
    max_ttft_s: float = Field(
        0.0,
        ge=0,
        description="a request whose first token is expected later is refused at once; 0 never",
    )
    scaling_utilization: float = Field(
        0.7,
        gt=0,
        le=1.0,
        description="share of its capacity that desired_replicas lets a service use",
    )
    scaling_drain_s: float = Field(
        10.0, gt=0, description="in which desired_replicas lets a service work off its queue"
    )
    scaling_down_after_s: float = Field(
        300.0, ge=0, description="fewer replicas are wanted after so long without need of more"
    )
    scaling_idle_s: float = Field(
        0.0,
        ge=0,
        description="no compute is wanted of a model after so long without a request; 0: one is",
    )
    grace_s: float = Field(30.0, ge=0, description=GRACE)
