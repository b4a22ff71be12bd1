"""What operators ask of a router, and the paths that other servers have."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from common.messages.address import Address
from common.messages.control import ModelCard
from common.messages.queries import InspectionQuery
from services.router.refused_keys import DELAY_S, FREE_ATTEMPTS
from tests.flow.router_ring import CHAT, TEXT, chat, error_of, running_router, waiting

KEY = {"Authorization": "Bearer secret-key-1"}


async def get(ring: Any, path: str, **more: Any) -> tuple[int, Any]:
    async with ring.session.get(path, **more) as response:
        return response.status, await response.json()


async def test_server_info_shows_models_and_settings_but_no_key() -> None:
    async with running_router(api_keys=("secret-key-1",)) as ring:
        async with ring.session.get("/server_info", headers=KEY) as response:
            text = await response.text()
            found = await response.json()
    assert found["models"][0]["id"] == "demo" and found["models"][0]["max_model_len"] == 512
    assert found["workers"] == {"tokenizer": 1, "compute": 1, "detokenizer": 1}
    assert found["router"]["placement"] == "least_load"
    assert "secret" not in text


async def test_strangers_learn_nothing_of_the_instances() -> None:
    async with running_router(api_keys=("secret-key-1",), metrics_token="scraper") as ring:
        assert await get(ring, "/health") == (200, {"status": "ok", "missing": []})
        for path in ("/metrics", "/scaling"):
            async with ring.session.get(path) as response:
                assert response.status == 401
        for key in ("secret-key-1", "scraper"):
            headers = {"Authorization": f"Bearer {key}"}
            found = (await get(ring, "/health", headers=headers))[1]
            assert {each["name"] for each in found["instances"]} == set(ring.workers)
            async with ring.session.get("/metrics", headers=headers) as response:
                assert "slipstream_workers" in await response.text()
            assert "desired_replicas" in (await get(ring, "/scaling", headers=headers))[1]
        for path in ("/server_info", "/v1/models", "/timeline"):
            assert (await get(ring, path, headers=headers))[0] == 401, "the scraper's is no API key"
        wrong = {"Authorization": "Bearer secret-key-2"}
        assert (await get(ring, "/health", headers=wrong))[0] == 401


async def test_strangers_do_not_learn_which_workers_are_refused() -> None:
    for keys, expected in ((), True), (("secret-key-1",), False):
        async with running_router(api_keys=keys) as ring:
            stranger = Address("ipc:///run/s/tokenizer-9.sock", "f" * 16)
            ring.actor.dispatch.fleet.refuse(stranger, "speaks another protocol", ring.now_s)
            assert ("refused" in (await get(ring, "/ready"))[1]) == expected
            assert ("refused" in (await get(ring, "/health"))[1]) == expected
            assert "refused" in (await get(ring, "/health", headers=KEY))[1]


async def test_wrong_keys_are_counted_and_answered_late() -> None:
    wrong = {"X-Api-Key": "secret-key-2"}
    async with running_router(api_keys=("secret-key-1",)) as ring:
        begin_s = time.monotonic()
        for _ in range(FREE_ATTEMPTS + 1):
            assert (await get(ring, "/v1/models", headers=wrong))[0] == 401
        took_s = time.monotonic() - begin_s
        assert took_s >= DELAY_S, "the last one was not held back"
        guess = asyncio.create_task(get(ring, "/v1/models", headers=wrong))
        await ring.until(lambda: ring.actor.dispatch.num_handlers == 1)
        assert (await get(ring, "/v1/models", headers=KEY))[0] == 200
        assert (await get(ring, "/v1/models"))[0] == 401
        assert not guess.done(), "who has a key, or sends none, does not wait"
        guess.cancel()
        await asyncio.gather(guess, return_exceptions=True)
        async with ring.session.get("/metrics", headers=KEY) as response:
            assert f"refused_keys_total {FREE_ATTEMPTS + 2}.0" in await response.text()


@pytest.mark.parametrize("path", ["/server_info", "/tokenizer_info", "/load"])
async def test_operators_need_a_key_where_there_is_one(path: str) -> None:
    async with running_router(api_keys=("secret-key-1",)) as ring:
        assert (await get(ring, path))[0] == 401


async def test_load_counts_what_is_being_answered() -> None:
    async with running_router() as ring:
        assert await get(ring, "/load") == (200, {"server_load": 0})
        task = await waiting(ring, chat())
        assert await get(ring, "/load") == (200, {"server_load": 1})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ring.until(ring.is_empty)


async def test_tokenizer_info_is_what_the_tokenizer_says() -> None:
    async with running_router() as ring:
        ring.workers["tokenizer"].about = {"chat_template": "{{ messages }}"}
        assert await get(ring, "/tokenizer_info") == (200, {"chat_template": "{{ messages }}"})
        status, body = await get(ring, "/tokenizer_info?model=other")
        assert status == 404 and body["error"]["code"] == "model_not_found"


async def test_every_compute_forgets_its_prefixes() -> None:
    async with running_router() as ring:
        ring.worker("compute-b", "compute")
        ring.workers["compute"].about = {"pages_freed": 3}
        ring.workers["compute-b"].about = {"pages_freed": 0}
        ring.beat()
        await ring.settle()
        async with ring.post("/reset_prefix_cache", None) as response:
            body = await response.json()
            assert response.status == 200 and body["success"] is True
            assert sorted(body["pages_freed"].values()) == [0, 3]
        assert len(ring.workers["compute"].of(InspectionQuery)) == 1


async def test_a_compute_that_does_not_answer_is_no_success() -> None:
    async with running_router(query_timeout_s=0.05) as ring:
        ring.script = None
        async with ring.post("/reset_prefix_cache", None) as response:
            body = await response.json()
        assert response.status == 503 and body["success"] is False
        assert list(body["pages_freed"].values()) == [None]


async def test_ping_is_readiness_without_a_key() -> None:
    async with running_router(api_keys=("secret-key-1",)) as ring:
        assert (await get(ring, "/ping"))[0] == 200
        async with ring.session.post("/ping") as response:
            assert response.status == 200
    async with running_router(workers=False) as ring:
        assert (await get(ring, "/ping"))[0] == 503


@pytest.mark.parametrize(
    ("body", "kind"),
    [(chat(), "chat.completion"), ({"model": "demo", "prompt": "Hi"}, "text_completion")],
)
async def test_an_invocation_goes_where_its_fields_belong(body: Any, kind: str) -> None:
    async with running_router() as ring, ring.post("/invocations", body) as response:
        assert response.status == 200
        assert (await response.json())["object"] == kind


async def test_an_invocation_of_nothing_says_what_to_give() -> None:
    async with running_router() as ring, ring.post("/invocations", {"model": "demo"}) as response:
        error = error_of(await response.read())
        assert response.status == 400
        assert error["message"] == "messages: is missing; give messages, prompt or input"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_base_url_without_v1_will_do(path: str) -> None:
    body = chat() if path == CHAT else {"model": "demo", "prompt": "Hi"}
    async with running_router() as ring:
        async with ring.post(path.removeprefix("/v1"), body) as response:
            assert response.status == 200
        assert (await get(ring, "/models/demo"))[1]["id"] == "demo"


async def test_messages_without_v1_are_refused_in_anthropics_shape() -> None:
    async with running_router() as ring, ring.post("/messages", {}) as response:
        assert response.status == 400
        assert (await response.json())["type"] == "error"


async def test_a_model_answers_to_each_of_its_names() -> None:
    card = ModelCard("large", "rev1", 1000, 512, 511, 511, aliases=("gpt-4o", "other"))
    async with running_router(workers=False) as ring:
        for service in ("tokenizer", "compute", "detokenizer"):
            ring.worker(service, service, card)  # type: ignore[arg-type]
        ring.beat()
        await ring.settle()
        for name in ("large", "gpt-4o"):
            async with ring.post(CHAT, {**chat(), "model": name}) as response:
                assert response.status == 200
                assert (await response.json())["model"] == "large"
        listed = (await get(ring, "/v1/models"))[1]["data"]
        assert [each["id"] for each in listed] == ["large", "gpt-4o", "other"]
        assert {each["root"] for each in listed} == {"large"}
        assert (await get(ring, "/v1/models/other"))[1]["id"] == "other"
