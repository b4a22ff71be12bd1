"""The responses that one router keeps: stored ones, and those that run in the background.

Every router has its own, in memory: bounded in number, bytes and time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from common.messages.failure import Failure
from services.router.errors import ApiError, bad_field, shown
from services.router.generation import Generation, RequestContext
from services.router.responses.format import ResponsesFormat
from services.router.sse import json_bytes

STORE_OFF: Final = "this server keeps no responses (responses_max is 0): send the conversation"
BROKEN: Final = Failure(500, "internal_error", "the server failed on this request")


class EventLog:
    """The events of a background response, which clients follow; written like a transport."""

    __slots__ = ("_change", "_ended", "_events", "num_bytes")

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._ended = False
        self._change = asyncio.Event()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._events)

    def write(self, data: bytes) -> None:
        """Take complete events."""
        self.num_bytes += len(data)
        self._events += (event + b"\n\n" for event in data.split(b"\n\n")[:-1])
        self._wake()

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def end(self) -> None:
        self._ended = True
        self._wake()

    abort = end

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yield the events with numbers above `after`, and new ones as they come."""
        at = after + 1
        while True:
            if at < len(self._events):
                events, at = self._events[at:], len(self._events)
                yield b"".join(events)
            elif self._ended:
                return
            else:
                await self._change.wait()

    def _wake(self) -> None:
        self._change.set()  # wakes those that wait now
        self._change.clear()


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response with its input items; the first `num_before` come from previous responses.

    A background response has `events`, and `cancel` while it runs.
    """

    owner: str
    body: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    num_before: int
    size: int
    events: EventLog | None = None
    cancel: Callable[[], object] | None = None
    expires_at_s: float = 0.0

    @property
    def id(self) -> str:
        return str(self.body["id"])

    def own_items(self) -> dict[tuple[str, str], dict[str, Any]]:
        items = (*self.items[self.num_before :], *self.body["output"])
        return {(self.owner, item["id"]): item for item in items}


class ResponseStore:
    """All stored responses; when there are too many, the oldest go first.

    Only its owner can see a response.
    """

    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], dict[str, Any]] = {}
        self.num_bytes = 0

    @property
    def keeps(self) -> bool:
        return self._max_responses > 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: StoredResponse) -> None:
        response.expires_at_s = self._clock() + self._ttl_s
        self._responses[response.id] = response
        self._take(response)

    def change(self, response: StoredResponse, body: dict[str, Any], size: int) -> None:
        """Replace the body of a response, in the store too if it is still there."""
        if self._responses.get(response.id) is response:
            self._drop(response)
            response.body, response.size = body, size
            self._take(response)
        response.body = body

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response; ApiError 404 if this owner has none with this id."""
        self._shrink()
        response = self._responses.get(response_id)
        if response is None or response.owner != owner:
            raise _not_found(response_id)
        return response

    def item(self, item_id: str, owner: str) -> dict[str, Any] | None:
        self._shrink()
        return self._items.get((owner, item_id))

    def remove(self, response: StoredResponse) -> None:
        if self._responses.get(response.id) is response:
            del self._responses[response.id]
            self._drop(response)

    def _take(self, response: StoredResponse) -> None:
        self.num_bytes += response.size
        self._items.update(response.own_items())
        self._shrink()

    def _drop(self, response: StoredResponse) -> None:
        self.num_bytes -= response.size
        for key, item in response.own_items().items():
            if self._items.get(key) is item:
                del self._items[key]

    def of(self, owner: str) -> History:
        return History(self, owner)

    def _shrink(self) -> None:
        """Drop what is too old or too much, except responses that are still running."""
        now_s = self._clock()
        for response in list(self._responses.values()):
            is_too_much = (
                len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes
            )
            if not is_too_much and response.expires_at_s > now_s:
                return
            if response.cancel is None:
                self.remove(response)


@dataclass(frozen=True, slots=True)
class History:
    """The stored responses that one owner's requests can continue from."""

    store: ResponseStore
    owner: str

    def before(self, response_id: str) -> tuple[dict[str, Any], ...]:
        """Return the items up to the end of a response; ApiError if it is not complete."""
        field = "previous_response_id"
        if not self.store.keeps:
            raise bad_field(field, STORE_OFF, "unsupported_parameter")
        try:
            response = self.store.get(response_id, self.owner)
        except ApiError as error:
            raise ApiError(replace(error.failure, field=field)) from None
        if (status := response.body["status"]) not in ("completed", "incomplete"):
            raise bad_field(field, f"names a response that cannot be gone on from: it is {status}")
        return (*response.items, *response.body["output"])

    def item(self, item_id: str) -> dict[str, Any] | None:
        return self.store.item(item_id, self.owner)


FORGETFUL: Final = ResponseStore(0, 0, 0.0).of("")


def _not_found(response_id: str) -> ApiError:
    message = (
        f"there is no response {shown(response_id)} here: it was not stored, has expired, was "
        "deleted, belongs to another API key, or is at another router of this server, each of "
        "which keeps its own in memory"
    )
    return ApiError(Failure(404, "response_not_found", message))


class Background:
    """Runs requests whose answers only go into the store."""

    def __init__(self, generation: Generation, store: ResponseStore) -> None:
        self._generation = generation
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self, context: RequestContext[ResponsesFormat], response: StoredResponse
    ) -> EventLog:
        """Start a response and return when it is admitted; ApiError if it is refused."""
        events = response.events = EventLog()
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[None] = loop.create_future()
        task = loop.create_task(self._run(context, response, events, admitted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        response.cancel = task.cancel
        self._store.put(response)
        await asyncio.wait((task, admitted), return_when=asyncio.FIRST_COMPLETED)
        if not admitted.done():
            self._store.remove(response)
            await task  # raises the refusal
        return events

    async def _run(
        self,
        context: RequestContext[ResponsesFormat],
        response: StoredResponse,
        events: EventLog,
        admitted: asyncio.Future[None],
    ) -> None:
        dispatch, layout = self._generation.dispatch, context.layout
        dispatch.num_handlers += 1  # a stopping server waits for it
        try:
            with context.span:
                await self._generation.record(context, events, admitted)
        except asyncio.CancelledError:
            layout.cancelled()
        except ApiError as error:
            if not admitted.done():
                raise
            events.write(layout.opening(0, None) + layout.failed(error.failure))
        except Exception as error:
            structlog.get_logger().error("response failed", response=response.id, exc_info=error)
            events.write(layout.failed(BROKEN))
        finally:
            dispatch.num_handlers -= 1
            response.cancel = None
            events.end()
            if layout.final is not None:
                size = response.size + events.num_bytes + len(json_bytes(layout.final))
                self._store.change(response, layout.final, size)
