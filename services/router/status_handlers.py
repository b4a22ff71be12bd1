"""Probes, metrics, `/version` and `/v1/models`: what this router is and knows."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import web

from common.messages.control import ModelCard, StepReport
from common.messages.failure import Failure
from common.messages.sampling import SamplingParams
from services.router.anthropic.endpoints import model_info, model_list
from services.router.dispatch import Dispatch
from services.router.errors import ApiError
from services.router.fleet import SERVICES, Group, RegisteredWorker
from services.router.metrics import exposition
from services.router.middleware import is_anthropic
from services.router.sse import json_bytes

MAX_TICK_AGE_S = 5.0  # ticks come ten times a second
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SAMPLING_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
RETRY_AFTER_S = "1"  # workers register twice a second


class StatusHandlers:
    """The handlers of probes and of the model list."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.ticked_at_s = time.monotonic()
        self._dispatch = dispatch
        self._created = int(time.time())
        self._version = installed_version()

    async def live(self, request: web.Request) -> web.Response:
        """Say whether the loop turns and its ticks come."""
        age_s = time.monotonic() - self.ticked_at_s
        status = "ok" if age_s < MAX_TICK_AGE_S else "stuck"
        return _json({"status": status}, 200 if status == "ok" else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """Say whether new work is taken."""
        return self._readiness({})

    async def health(self, request: web.Request) -> web.Response:
        """Say whether new work is taken, what there is of every service, and how busy it is.

        `requests`, `attempts` and `queries` are this router's; what is said of an instance is as
        of its last heartbeat, `open` being the attempts of this router that it has state for.
        """
        counts = dict.fromkeys(SERVICES, 0)
        for worker in self._dispatch.fleet.workers():
            counts[worker.service] += 1
        inflight = self._dispatch.inflight
        return self._readiness(
            {
                "workers": counts,
                "instances": list(map(_instance, self._dispatch.fleet.workers())),
                "requests": inflight.num_requests,
                "attempts": len(inflight),
                "queries": len(self._dispatch.queries),
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Say the same in numbers, as Prometheus reads them."""
        body = exposition(self._dispatch)
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    async def version(self, request: web.Request) -> web.Response:
        """Say which release this is."""
        return _json({"version": self._version})

    async def models(self, request: web.Request) -> web.Response:
        """List the models that are served, in the shape of the client's API."""
        groups = self._complete_groups()
        found = {name: self._card(group, name) for group in groups for name in group.card.names}
        cards = list(found.values())
        if is_anthropic(request):
            return _json(model_list(cards))
        return _json({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        """Describe one model."""
        name = request.match_info["model"]
        for group in self._complete_groups():
            if name in group.card.names:
                card = self._card(group, name)
                return _json(model_info(card) if is_anthropic(request) else card)
        message = f"the model {name[:100]!r} does not exist; /v1/models lists those that do"
        raise ApiError(Failure(404, "model_not_found", message, "model"))

    def _readiness(self, more: dict[str, Any]) -> web.Response:
        dispatch = self._dispatch
        missing = list(dispatch.fleet.missing)
        status = "draining" if dispatch.draining else "waiting" if missing else "ok"
        body = {"status": status, "missing": missing, **more}
        response = _json(body, 200 if dispatch.ready else 503)
        if not dispatch.ready:
            response.headers["Retry-After"] = RETRY_AFTER_S
        return response

    def _complete_groups(self) -> list[Group]:
        return [group for group in self._dispatch.fleet.groups() if not group.missing]

    def _card(self, group: Group, name: str) -> dict[str, Any]:
        computes = group.workers["compute"]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "slipstream",
            "root": group.card.name,
            "max_model_len": max(worker.model.max_model_len for worker in computes),
            "sampling_defaults": sampling_in_force(group.card),
        }


def sampling_in_force(card: ModelCard) -> dict[str, float]:
    """Return what holds for each sampling setting that a request leaves out."""
    plain = SamplingParams(max_tokens=0, seed=0)
    values = {name: getattr(plain, name) for name in SAMPLING_SETTINGS}
    values |= dict(card.sampling_defaults)
    return {**values, "top_k": max(0, int(values["top_k"]))}  # -1 is another name for "off"


def installed_version() -> str:
    """Return the release of the installed package."""
    try:
        return version("slipstream")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


def _instance(worker: RegisteredWorker) -> dict[str, Any]:
    load = worker.load
    found = {
        "service": worker.service,
        "name": worker.name,
        "instance_id": worker.address.instance_id,
        "incarnation": worker.address.instance_id,  # its former name, for one release
        "draining": worker.draining,
        "open": worker.num_open,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "capacity": load.capacity,
        "kv_usage": round(load.kv_usage, 4),
    }
    if load.steps is not None:
        found["steps"] = _steps(load.steps)
    return found


def _steps(report: StepReport) -> dict[str, Any]:
    return {
        "count": report.num_steps,
        "prefill_tokens": report.num_prefill_tokens,
        "sampled_tokens": report.num_samples,
        "preemptions": report.num_preemptions,
        "seconds": {
            name: {"p50": round(p50, 6), "p99": round(p99, 6)} for name, p50, p99 in report.times
        },
        "device_idle_ratio": report.device_idle_ratio,
    }


def _json(value: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=json_bytes(value), status=status, content_type="application/json")
