"""ORCA: a client that asks for it reads the load of the computes in a header of its answer."""

from __future__ import annotations

import json

import pytest

from common.messages.control import Load
from tests.flow.router_ring import CHAT, chat, running_router

FORMAT = "endpoint-load-metrics-format"
REPORT = "endpoint-load-metrics"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_reports_the_load_in_the_format_that_is_asked_for(stream: bool) -> None:
    async with running_router() as ring:
        ring.beat("compute", load=Load(7, 3, 64, 0.25))
        await ring.settle()
        async with ring.post(CHAT, chat(stream=stream), headers={FORMAT: "TEXT"}) as response:
            assert response.headers[REPORT] == (
                "TEXT application_utilization=0.1562, named_metrics.kv_cache_usage_perc=0.25, "
                "named_metrics.num_requests_waiting=3"
            )
        async with ring.post(CHAT, chat(stream=stream), headers={FORMAT: "json"}) as response:
            written = response.headers[REPORT]
    assert json.loads(written.removeprefix("JSON ")) == {
        "application_utilization": 0.1562,
        "named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3},
    }


@pytest.mark.parametrize("headers", [{}, {FORMAT: "BIN"}])
async def test_who_asks_for_no_known_format_gets_no_report(headers: dict[str, str]) -> None:
    async with running_router() as ring, ring.post(CHAT, chat(), headers=headers) as response:
        assert response.status == 200
        assert REPORT not in response.headers


async def test_without_a_key_nothing_is_told_of_the_load() -> None:
    async with running_router(api_keys=("secret-key-1",)) as ring:
        for key in ("wrong-key", "secret-key-1"):
            headers = {FORMAT: "TEXT", "Authorization": f"Bearer {key}"}
            async with ring.post(CHAT, chat(), headers=headers) as response:
                assert (REPORT in response.headers) == (response.status == 200)
