"""What Amazon SageMaker asks of a container: `/ping`, and one `/invocations` for every API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from services.router.endpoint import Backend, Endpoint
from services.router.errors import bad_field
from services.router.middleware import Handler
from services.router.request_body import read_json


class SageMakerHandlers:
    """Hands an invocation to the API that its fields belong to."""

    def __init__(
        self, ready: Handler, endpoints: Mapping[str, Endpoint[Any]], backend: Backend
    ) -> None:
        """Take the handler of readiness, and endpoints by the field that only they have."""
        self._ready = ready
        self._settings = backend.settings
        self._handlers = {field: each.handler(backend) for field, each in endpoints.items()}

    def routes(self) -> list[web.RouteDef]:
        """Return what belongs into the application."""
        return [
            web.get("/ping", self._ready),
            web.post("/ping", self._ready),
            web.post("/invocations", self.invocations),
        ]

    async def invocations(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat, a completion or an embedding; ApiError 400 for anything else."""
        body = await read_json(request, self._settings)  # aiohttp keeps it for the handler
        for field, handler in self._handlers.items():
            if body.get(field) is not None:
                return await handler(request)
        fields = list(self._handlers)
        raise bad_field(fields[0], f"is missing; give {', '.join(fields[:-1])} or {fields[-1]}")
