"""What operators ask: `/server_info`, `/tokenizer_info`, `/load`, `/reset_prefix_cache`."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from common.errors import LinkError
from common.messages.control import ModelCard
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch
from services.router.errors import ApiError
from services.router.fleet import SERVICES, RegisteredWorker
from services.router.sse import json_bytes
from services.router.status_handlers import installed_version

SECRET_SETTINGS = frozenset({"api_keys", "api_keys_file"})


class OperatorHandlers:
    """The handlers of these endpoints; all of them want a key where there are some."""

    def __init__(self, dispatch: Dispatch, settings: RouterSettings) -> None:
        self._dispatch = dispatch
        self._settings = settings

    def routes(self) -> list[web.RouteDef]:
        """Return what belongs into the application."""
        return [
            web.get("/load", self.load),
            web.get("/server_info", self.server_info),
            web.get("/tokenizer_info", self.tokenizer_info),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def load(self, request: web.Request) -> web.Response:
        """Say how many requests this router is answering, as vLLM's `/load` does."""
        return _json({"server_load": self._dispatch.inflight.num_requests})

    async def server_info(self, request: web.Request) -> web.Response:
        """Show the release, the models with their limits, and the settings but for the keys."""
        fleet = self._dispatch.fleet
        counts = dict.fromkeys(SERVICES, 0)
        for worker in fleet.workers():
            counts[worker.service] += 1
        settings = self._settings.model_dump(mode="json", exclude=set(SECRET_SETTINGS))
        return _json(
            {
                "version": installed_version(),
                "models": [_model(group.card) for group in fleet.groups() if not group.missing],
                "workers": counts,
                "router": settings,
            }
        )

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        """Show the model's tokenizer_config.json, with its chat template and what it writes."""
        group = self._dispatch.group(request.query.get("model", ""))
        worker = self._dispatch.place(group, "tokenizer")
        return _json(await self._dispatch.inspect(worker, "tokenizer"))

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Have every compute forget the pages that no running sequence holds."""
        workers = [each for each in self._dispatch.fleet.workers() if each.service == "compute"]
        found = await asyncio.gather(*map(self._reset, workers))
        pages = {worker.name: freed for worker, freed in zip(workers, found, strict=True)}
        is_done = None not in found
        return _json({"success": is_done, "pages_freed": pages}, 200 if is_done else 503)

    async def _reset(self, worker: RegisteredWorker) -> int | None:
        """Return the pages that came free; None where the worker does not answer."""
        try:
            found = await self._dispatch.inspect(worker, "prefix_cache_reset")
        except (ApiError, LinkError):
            return None
        return int(found["pages_freed"])


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


def _json(value: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=json_bytes(value), status=status, content_type="application/json")
