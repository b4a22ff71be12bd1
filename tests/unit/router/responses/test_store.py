"""What is stored of responses: whose it is, how much, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.errors import ApiError
from services.router.responses.store import ResponseStore, StoredResponse


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def made(name: str, owner: str = "", size: int = 10, **fields: Any) -> StoredResponse:
    message = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": "Hello"}
    question = {"type": "message", "id": f"msg_{name}i", "role": "user", "content": "Hi"}
    body = {"id": name, "status": "completed", "output": [message]}
    return StoredResponse(owner, body, (question,), 0, size, **fields)


def store_of(*stored: StoredResponse, clock: Clock | None = None, **limits: Any) -> ResponseStore:
    bounds: dict[str, Any] = {"max_responses": 2, "max_bytes": 100, "ttl_s": 60.0, **limits}
    store = ResponseStore(**bounds, clock=clock or Clock())
    for response in stored:
        store.put(response)
    return store


def names(store: ResponseStore, *context: str) -> list[str]:
    ids = []
    for name in context:
        try:
            ids.append(store.get(name, "").id)
        except ApiError as error:
            assert error.failure.status == 404
    return ids


def test_the_oldest_goes_when_there_are_too_many() -> None:
    assert names(store_of(made("a"), made("b"), made("c")), "a", "b", "c") == ["b", "c"]


def test_the_oldest_goes_when_they_are_too_large() -> None:
    store = store_of(made("a", size=60), made("b", size=60))
    assert names(store, "a", "b") == ["b"]
    assert store.num_bytes == 60
    assert names(store_of(made("a", size=101)), "a") == []


def test_all_go_in_their_time() -> None:
    clock = Clock()
    store = store_of(made("a"), clock=clock)
    clock.now_s += 30
    store.put(made("b"))
    clock.now_s += 30
    assert names(store, "a", "b") == ["b"]
    assert store.item("msg_a", "") is None
    clock.now_s += 30
    assert names(store, "b") == []
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_is_being_made_stays() -> None:
    running = made("a", cancel=lambda: None)
    store = store_of(running, made("b"), made("c"))
    assert names(store, "a", "b", "c") == ["a", "c"]
    running.cancel = None
    store.change(running, {**running.body, "status": "incomplete"}, 20)
    assert store.get("a", "").body["status"] == "incomplete"
    assert store.num_bytes == 30


def test_a_response_is_its_owners_alone() -> None:
    store = store_of(made("a", owner="one"))
    assert store.get("a", "one").id == "a"
    assert store.of("one").item("msg_a") is not None
    assert store.of("two").item("msg_a") is None
    for call in (lambda: store.get("a", "two"), lambda: store.of("two").before("a")):
        with pytest.raises(ApiError, match="belongs to another API key") as caught:
            call()
        assert caught.value.failure.status == 404


def test_one_goes_on_from_input_and_output() -> None:
    store = store_of(made("a"))
    assert [item["id"] for item in store.of("").before("a")] == ["msg_ai", "msg_a"]
    store.get("a", "").body["status"] = "in_progress"
    with pytest.raises(ApiError, match="in_progress") as caught:
        store.of("").before("a")
    assert caught.value.failure.field == "previous_response_id"


def test_a_removed_response_leaves_nothing() -> None:
    stored = made("a")
    store = store_of(stored)
    store.remove(stored)
    store.remove(stored)
    assert (len(store), store.num_bytes, store.item("msg_a", "")) == (0, 0, None)


def test_a_store_of_none_keeps_none() -> None:
    store = store_of(max_responses=0)
    assert not store.keeps
    assert store.of("").item("msg_a") is None
    with pytest.raises(ApiError, match="responses_max"):
        store.of("").before("a")
