"""The OpenAPI document against the routes that there are."""

from __future__ import annotations

from services.router.openapi.document import build_document
from tests.flow.router_ring import running_router

# The page, which is for people.
NOT_IN_IT = ("/page/", "/favicon.ico")


async def test_every_route_is_in_the_document_and_nothing_else() -> None:
    documented = {
        (method.upper(), path)
        for path, operations in build_document("0")["paths"].items()
        for method in operations
    }
    async with running_router() as ring:
        routes = {(method, path) for method, path in ring.actor.routes if method != "HEAD"}
    served = {
        (method, path)
        for method, path in routes
        if path != "/" and not path.startswith(NOT_IN_IT) and (method, f"/v1{path}") not in routes
    }
    assert served == documented
