"""Responses that are made while nobody waits: tasks that write into the store."""

from __future__ import annotations

import asyncio

import structlog

from common.messages.failure import Failure
from services.router.errors import ApiError
from services.router.generation import Asked, Generation
from services.router.responses.event_log import EventLog
from services.router.responses.format import ResponsesFormat
from services.router.responses.history import ResponseStore, StoredResponse
from services.router.sse import json_bytes

BROKEN = Failure(500, "internal_error", "the server failed on this request")


class Background:
    """Runs requests whose answers go into the store alone."""

    def __init__(self, generation: Generation, store: ResponseStore) -> None:
        self._generation = generation
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, asked: Asked[ResponsesFormat], stored: StoredResponse) -> EventLog:
        """Begin a response; returns when it is admitted. ApiError if it is not."""
        events = stored.events = EventLog()
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[None] = loop.create_future()
        task = loop.create_task(self._run(asked, stored, events, admitted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        stored.cancel = task.cancel
        self._store.put(stored)
        await asyncio.wait((task, admitted), return_when=asyncio.FIRST_COMPLETED)
        if not admitted.done():
            self._store.remove(stored)
            await task  # raises why not
        return events

    async def _run(
        self,
        asked: Asked[ResponsesFormat],
        stored: StoredResponse,
        events: EventLog,
        admitted: asyncio.Future[None],
    ) -> None:
        dispatch, layout = self._generation.dispatch, asked.layout
        dispatch.num_handlers += 1  # a server that stops waits for it
        try:
            with asked.span:
                await self._generation.record(asked, events, admitted)
        except asyncio.CancelledError:
            layout.cancelled()
        except ApiError as error:
            if not admitted.done():
                raise
            events.write(layout.opening(0, None) + layout.failed(error.failure))
        except Exception as error:
            structlog.get_logger().error("response failed", response=stored.id, exc_info=error)
            events.write(layout.failed(BROKEN))
        finally:
            dispatch.num_handlers -= 1
            stored.cancel = None
            events.end()
            if layout.final is not None:
                size = stored.size + events.num_bytes + len(json_bytes(layout.final))
                self._store.change(stored, layout.final, size)
