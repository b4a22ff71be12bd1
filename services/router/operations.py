"""Endpoints for operators, health checks and platforms: status, metrics, models, SageMaker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import web

from common.errors import LinkError
from common.messages.address import Address
from common.messages.control import ModelCard, StepReport
from common.messages.failure import Failure
from common.messages.sampling import SamplingParams
from services.router.anthropic.endpoints import model_info, model_list
from services.router.breaker import LeftAlone
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch
from services.router.endpoint import Backend, Endpoint, json_response
from services.router.errors import ApiError, bad_field
from services.router.expert_metrics import expert_lines
from services.router.groups import SERVICES, Group, RegisteredWorker, name_of
from services.router.metrics import exposition
from services.router.middleware import (
    HEALTH,
    METRICS,
    OBSERVES,
    SCALING,
    Handler,
    is_anthropic,
)
from services.router.refused_keys import RefusedKeys
from services.router.service_signals import ServiceSignals, scaling_report

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
SECRET_SETTINGS = frozenset({"api_keys", "api_keys_file", "metrics_token"})
RETRY_AFTER_S = "1"  # workers register twice a second


class StatusHandlers:
    """What platforms and operators ask, and the model list; `ticked_at_s` is set by each tick."""

    def __init__(
        self,
        dispatch: Dispatch,
        settings: RouterSettings,
        refused: RefusedKeys,
        signals: ServiceSignals,
    ) -> None:
        self.ticked_at_s = time.monotonic()
        self._refused = refused
        self._signals = signals
        self._dispatch = dispatch
        self._settings = settings
        self._created = int(time.time())
        self._version = installed_version()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.get("/version", self.version),
            web.get("/live", self.live),
            web.get("/ready", self.ready),
            web.get(HEALTH, self.health),
            web.get(METRICS, self.metrics),
            web.get(SCALING, self.scaling),
            web.get("/load", self.load),
            web.get("/server_info", self.server_info),
            web.get("/tokenizer_info", self.tokenizer_info),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def live(self, request: web.Request) -> web.Response:
        """Say whether the event loop runs and its ticks come."""
        age_s = time.monotonic() - self.ticked_at_s
        status = "ok" if age_s < MAX_TICK_AGE_S else "stuck"
        return json_response({"status": status}, 200 if status == "ok" else 503)

    async def ready(self, request: web.Request) -> web.Response:
        return self._readiness(request[OBSERVES], {})

    async def health(self, request: web.Request) -> web.Response:
        """Say whether new work is taken, and to who may know it, describe the instances.

        Replicas that failed again and again are `left_alone`; after so many seconds one gets a
        trial. `requests`, `attempts` and `queries` are this router's. The load of an instance is
        that of its last heartbeat; `open` counts this router's attempts that it has state for.
        """
        if not request[OBSERVES]:
            return self._readiness(False, {})
        inflight = self._dispatch.inflight
        return self._readiness(
            True,
            {
                "workers": _worker_counts(self._dispatch),
                "instances": list(map(_instance, self._dispatch.fleet.workers())),
                "left_alone": list(map(_left_alone, self._dispatch.left_alone())),
                "requests": inflight.num_requests,
                "attempts": len(inflight),
                "queries": len(self._dispatch.queries),
            },
        )

    async def metrics(self, request: web.Request) -> web.Response:
        body = bytearray(exposition(self._dispatch, self._refused, self._signals))
        for lines in expert_lines(list(self._dispatch.fleet.workers())):
            body += lines.encode()
            await asyncio.sleep(0)  # those of a large model take a few milliseconds
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    async def scaling(self, request: web.Request) -> web.Response:
        """Say how many replicas each service should have, of one model or of all together."""
        return json_response(scaling_report(self._signals, request.query.get("model", "")))

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": self._version})

    async def models(self, request: web.Request) -> web.Response:
        """List the models and whether they are loaded, in the shape of the client's API."""
        cards = list(self._cards().values())
        if is_anthropic(request):
            return json_response(model_list(cards))
        return json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if (card := self._cards().get(name)) is not None:
            return json_response(model_info(card) if is_anthropic(request) else card)
        message = f"the model {name[:100]!r} does not exist; /v1/models lists those that do"
        raise ApiError(Failure(404, "model_not_found", message, "model"))

    def _readiness(self, names_workers: bool, more: dict[str, Any]) -> web.Response:
        dispatch = self._dispatch
        missing = list(dispatch.fleet.missing)
        status = "draining" if dispatch.draining else "waiting" if missing else "ok"
        if status == "waiting" and dispatch.waits_to_wake:
            status = "asleep"
        elif status == "ok" and not dispatch.fleet.healthy:  # requests are served all the same
            status = "unhealthy"
        body = {"status": status, "missing": missing, **more}
        if names_workers and (refused := dispatch.fleet.refused):
            body["refused"] = refused
        is_ready = status in ("ok", "asleep")
        response = json_response(body, 200 if is_ready else 503)
        if not is_ready:
            response.headers["Retry-After"] = RETRY_AFTER_S
        return response

    async def load(self, request: web.Request) -> web.Response:
        """Count the requests that this router is answering, as vLLM's `/load` does."""
        return json_response({"server_load": self._dispatch.inflight.num_requests})

    async def server_info(self, request: web.Request) -> web.Response:
        """Show the release, the models with their limits, and the settings but for the keys."""
        settings = self._settings.model_dump(mode="json", exclude=set(SECRET_SETTINGS))
        return json_response(
            {
                "version": self._version,
                "models": [_model(group.card) for group in self._complete_groups()],
                "workers": _worker_counts(self._dispatch),
                "router": settings,
            }
        )

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        """Show the model's tokenizer_config.json, with its chat template and what it writes."""
        group = self._dispatch.group(request.query.get("model", ""))
        worker = self._dispatch.queries.place(group, "tokenizer")
        return json_response(await self._dispatch.queries.inspect(worker, "tokenizer"))

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Have every compute free the cached pages that no running sequence holds."""
        workers = [
            worker
            for worker in self._dispatch.fleet.workers()
            if worker.service == "compute" and not worker.model.loading
        ]
        counts = await asyncio.gather(*map(self._reset, workers))
        pages = {worker.name: freed for worker, freed in zip(workers, counts, strict=True)}
        is_done = None not in counts
        return json_response({"success": is_done, "pages_freed": pages}, 200 if is_done else 503)

    async def _reset(self, worker: RegisteredWorker) -> int | None:
        """Return the number of freed pages; None if the worker does not answer."""
        try:
            answer = await self._dispatch.queries.inspect(worker, "prefix_cache_reset")
        except (ApiError, LinkError):
            return None
        return int(answer["pages_freed"])

    def _complete_groups(self) -> list[Group]:
        return [group for group in self._dispatch.fleet.groups() if not group.missing]

    def _cards(self) -> dict[str, dict[str, Any]]:
        """Return the models by name; of two revisions the one that more can be done with."""
        fleet = self._dispatch.fleet
        names = dict.fromkeys(name for group in fleet.groups() for name in group.card.names)
        found = ((name, fleet.group(name)) for name in names)
        return {
            name: self._card(group, name)
            for name, group in found
            if group is not None and group.status != "incomplete"
        }

    def _card(self, group: Group, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "slipstream",
            "root": group.card.name,
            "status": group.status,
            "max_model_len": group.card.max_model_len,
            "sampling_defaults": sampling_in_force(group.card),
        }


def sampling_in_force(card: ModelCard) -> dict[str, float]:
    """Return the values of the sampling settings that a request leaves out."""
    plain = SamplingParams(max_tokens=0, seed=0)
    values = {name: getattr(plain, name) for name in SAMPLING_SETTINGS}
    values |= dict(card.sampling_defaults)
    return {**values, "top_k": max(0, int(values["top_k"]))}  # -1 is another name for "off"


def installed_version() -> str:
    try:
        return version("slipstream")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


def _worker_counts(dispatch: Dispatch) -> dict[str, int]:
    counts: dict[str, int] = dict.fromkeys(SERVICES, 0)
    for worker in dispatch.fleet.workers():
        counts[worker.service] += 1
    return counts


def _instance(worker: RegisteredWorker) -> dict[str, Any]:
    load = worker.load
    report = {
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
    if worker.model.loading:
        report["loading"] = True
    if worker.trouble:
        report["trouble"] = worker.trouble
    if load.steps is not None:
        report["steps"] = _steps(load.steps)
    return report


def _left_alone(replica: LeftAlone) -> dict[str, Any]:
    return {
        "name": name_of(Address(replica.endpoint, "")),
        "failures": replica.num_failures,
        "why": replica.why,
        "seconds": round(replica.for_s, 1),
    }


def _steps(report: StepReport) -> dict[str, Any]:
    return {
        "count": report.num_steps,
        "prefill_tokens": report.num_prefill_tokens,
        "sampled_tokens": report.num_samples,
        "preemptions": report.num_preemptions,
        "draft_tokens": report.num_draft_tokens,
        "accepted_tokens": report.num_accepted_tokens,
        "seconds": {
            name: {"p50": round(p50, 6), "p99": round(p99, 6)} for name, p50, p99 in report.times
        },
        "device_idle_ratio": report.device_idle_ratio,
    }


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "aliases": list(card.aliases),
        "revision": card.revision,
        "vocab_size": card.vocab_size,
        "max_model_len": card.max_model_len,
        "max_input_length": card.max_input_length,
        "max_output_length": card.max_output_length,
        "sampling_defaults": dict(card.sampling_defaults),
        "pooling": card.pooling,
    }


def sagemaker_routes(
    ready: Handler, endpoints: Mapping[str, Endpoint[Any]], backend: Backend
) -> list[web.RouteDef]:
    """Return the routes that Amazon SageMaker requires of a container.

    An invocation goes to the endpoint of the field that only its requests have.
    """

    async def invocations(request: web.Request) -> web.StreamResponse:
        body = await backend.bodies.read(request)
        for field, endpoint in endpoints.items():
            if body.get(field) is not None:
                return await endpoint.answer(backend, request, body)
        fields = list(endpoints)
        raise bad_field(fields[0], f"is missing; give {', '.join(fields[:-1])} or {fields[-1]}")

    return [
        web.get("/ping", ready),
        web.post("/ping", ready),
        web.post("/invocations", invocations),
    ]
