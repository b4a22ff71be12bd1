"""Load reports in headers of answers, for balancers: ORCA, as vLLM and Triton write it.

Who sends `endpoint-load-metrics-format: TEXT` or `JSON` gets `endpoint-load-metrics` with the load
of the computes behind this router.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from aiohttp import web

from services.router.dispatch import Dispatch
from services.router.groups import RegisteredWorker
from services.router.middleware import CLIENT

FORMAT_HEADER = "endpoint-load-metrics-format"
REPORT_HEADER = "endpoint-load-metrics"
NAMED = "named_metrics"  # ORCA's map for what it has no field of its own for


class LoadReporter:
    """Signs the answers of a router with the load of its computes."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    async def sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Report if the client asks for it and may ask for answers; before headers are sent."""
        format_name = request.headers.get(FORMAT_HEADER, "").upper()
        if format_name not in ("TEXT", "JSON") or CLIENT not in request:
            return
        workers = self._dispatch.fleet.workers()
        computes = [worker for worker in workers if worker.service == "compute"]
        if computes:
            named, utilization = loads_of(computes)
            response.headers[REPORT_HEADER] = written(format_name, named, utilization)


def loads_of(computes: Sequence[RegisteredWorker]) -> tuple[dict[str, float], float]:
    """Return vLLM's two gauges over all computes, and the share of their capacity in use.

    Requests that wait count, so the share may exceed 1.
    """
    loads = [compute.load for compute in computes]
    num_waiting = sum(load.num_waiting for load in loads)
    num_open = num_waiting + sum(load.num_running for load in loads)
    kv_usage = sum(load.kv_usage for load in loads) / len(loads)
    named = {"kv_cache_usage_perc": round(kv_usage, 4), "num_requests_waiting": num_waiting}
    return named, round(num_open / max(1, sum(load.capacity for load in loads)), 4)


def written(format_name: str, named: dict[str, float], utilization: float) -> str:
    """Write a report as the value of its header."""
    if format_name == "JSON":
        return "JSON " + json.dumps({"application_utilization": utilization, NAMED: named})
    pairs = {"application_utilization": utilization}
    pairs |= {f"{NAMED}.{name}": value for name, value in named.items()}
    return "TEXT " + ", ".join(f"{name}={value}" for name, value in pairs.items())
