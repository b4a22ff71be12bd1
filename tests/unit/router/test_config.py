"""The settings' names are an interface: changing one needs a changelog entry."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.router.config import RouterSettings


def test_the_settings_are_these() -> None:
    assert set(RouterSettings.model_fields) == {
        "host",
        "port",
        "api_keys",
        "api_keys_file",
        "metrics_token",
        "allowed_origins",
        "allowed_hosts",
        "placement",
        "unknown_fields",
        "max_body_bytes",
        "max_unfinished_body_bytes",
        "body_timeout_s",
        "keep_alive_s",
        "query_timeout_s",
        "max_in_flight",
        "max_in_flight_tokens",
        "max_in_flight_choices",
        "max_in_flight_per_client",
        "requests_per_s_per_client",
        "tokens_per_minute_per_client",
        "min_priority",
        "slow_client_buffer_bytes",
        "slow_client_max_bytes",
        "slow_client_timeout_s",
        "responses_max",
        "responses_max_bytes",
        "responses_ttl_s",
        "lease_s",
        "hold_s",
        "load_s",
        "wake_s",
        "max_wait_s",
        "max_ttft_s",
        "scaling_utilization",
        "scaling_drain_s",
        "scaling_down_after_s",
        "scaling_idle_s",
        "grace_s",
    }


@pytest.mark.parametrize(
    "values", [{"port": 70_000}, {"max_in_flight": 0}, {"placement": "random"}, {"hots": "x"}]
)
def test_what_cannot_work_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RouterSettings.model_validate(values)
