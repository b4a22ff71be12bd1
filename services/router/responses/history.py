"""The responses that one router keeps, so that requests can go on from them. Pure, given the clock.

Every router has its own, in memory: bounded in number, bytes and time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from common.messages.failure import Failure
from services.router.errors import ApiError, bad_field, shown
from services.router.responses.event_log import EventLog

STORE_OFF: Final = "this server keeps no responses (responses_max is 0): send the conversation"
GOES_ON: Final = ("completed", "incomplete")


class History(Protocol):
    """What a request may go on from."""

    @property
    def keeps(self) -> bool:
        """Whether responses are stored at all."""
        ...

    def before(self, response_id: str) -> tuple[dict[str, Any], ...]:
        """Return input and output of a response; ApiError if it cannot be gone on from."""
        ...

    def item(self, item_id: str) -> dict[str, Any] | None:
        """Return an item by its id, if it is stored."""
        ...


class _Forgetful:
    """Nothing of before."""

    keeps = False

    def before(self, response_id: str) -> tuple[dict[str, Any], ...]:
        """Refuse."""
        raise bad_field("previous_response_id", STORE_OFF, "unsupported_parameter")

    def item(self, item_id: str) -> None:
        """Find nothing."""
        return None


FORGETFUL: Final = _Forgetful()


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response: what it was made of, what it is by now, and its events where they are kept.

    The first `num_before` of its input's items are those of the responses before. While it is made
    in the background there is a `cancel`.
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
        """Its id."""
        return str(self.body["id"])

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items of its output, as far as it has come."""
        output: list[dict[str, Any]] = self.body["output"]
        return output

    def own_items(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the items that are its own, by owner and id."""
        items = (*self.items[self.num_before :], *self.output)
        return {(self.owner, item["id"]): item for item in items}


class ResponseStore:
    """All stored responses, the oldest first; whatever is too much goes, and the oldest of it.

    A response belongs to its owner: for anybody else there is none.
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
        """Whether anything is stored."""
        return self._max_responses > 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: StoredResponse) -> None:
        """Keep a response from now on."""
        stored.expires_at_s = self._clock() + self._ttl_s
        self._responses[stored.id] = stored
        self._take(stored)

    def change(self, stored: StoredResponse, body: dict[str, Any], size: int) -> None:
        """Keep what has become of a response, if it is still kept."""
        if self._responses.get(stored.id) is stored:
            self._drop(stored)
            stored.body, stored.size = body, size
            self._take(stored)
        stored.body = body

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response; ApiError 404 if there is none of this owner's."""
        self._shrink()
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            raise _not_found(response_id)
        return stored

    def item(self, item_id: str, owner: str) -> dict[str, Any] | None:
        """Return an item of a stored response."""
        self._shrink()
        return self._items.get((owner, item_id))

    def remove(self, stored: StoredResponse) -> None:
        """Keep a response no longer."""
        if self._responses.get(stored.id) is stored:
            del self._responses[stored.id]
            self._drop(stored)

    def _take(self, stored: StoredResponse) -> None:
        self.num_bytes += stored.size
        self._items.update(stored.own_items())
        self._shrink()

    def _drop(self, stored: StoredResponse) -> None:
        self.num_bytes -= stored.size
        for key, item in stored.own_items().items():
            if self._items.get(key) is item:
                del self._items[key]

    def of(self, owner: str) -> History:
        """Return what this owner's requests may go on from."""
        return _Owned(self, owner) if self.keeps else FORGETFUL

    def _shrink(self) -> None:
        """Let go what is too old or too much; what is being made stays."""
        now_s = self._clock()
        for stored in list(self._responses.values()):
            is_too_much = (
                len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes
            )
            if not is_too_much and stored.expires_at_s > now_s:
                return
            if stored.cancel is None:
                self.remove(stored)


class _Owned:
    """What one owner has in the store."""

    keeps = True

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner

    def before(self, response_id: str) -> tuple[dict[str, Any], ...]:
        """Return input and output of a response; ApiError 400 while it is not complete."""
        try:
            stored = self._store.get(response_id, self._owner)
        except ApiError as error:
            failure = replace(error.failure, field="previous_response_id")
            raise ApiError(failure) from None
        status = stored.body["status"]
        if status not in GOES_ON:
            raise bad_field(
                "previous_response_id",
                f"names a response that cannot be gone on from: it is {status}",
            )
        return (*stored.items, *stored.output)

    def item(self, item_id: str) -> dict[str, Any] | None:
        """Return an item by its id, if it is stored."""
        return self._store.item(item_id, self._owner)


def _not_found(response_id: str) -> ApiError:
    message = (
        f"there is no response {shown(response_id)} here: it was not stored, has expired, was "
        "deleted, belongs to another API key, or is at another router of this server, each of "
        "which keeps its own in memory"
    )
    return ApiError(Failure(404, "response_not_found", message))
