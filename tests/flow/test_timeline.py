"""`/timeline` over the whole ring: every process says what it did in the last seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.link.codec import unpack
from common.messages.arrays import uint32s, uint64s
from common.messages.experts import ExpertLoad
from common.messages.queries import Timeline, Track
from tests.flow.whole_ring import WholeRing, save_vocabulary, whole_ring


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vocabulary(tmp_path_factory.mktemp("hex"))


async def timeline_of(ring: WholeRing, **query: Any) -> dict[str, dict[str, Track]]:
    """Return the tracks of each part by name."""
    async with ring.sessions["router"].get("/timeline", params=query) as response:
        assert response.status == 200
        timeline = unpack(Timeline, await response.read())
    return {part.name: {track.name: track for track in part.tracks} for part in timeline.parts}


async def generate(ring: WholeRing, num_tokens: int = 12) -> None:
    body = {"model": "sim", "prompt": "hello", "max_tokens": num_tokens, "stream": True}
    async with ring.sessions["router"].post("/v1/completions", json=body) as response:
        assert b"[DONE]" in await response.read()


async def test_every_process_says_what_it_did(folder: Path) -> None:
    async with whole_ring(folder) as ring:
        await generate(ring)
        parts = await timeline_of(ring)
        assert list(parts) == ["router", "tokenizer", "compute", "detokenizer"]
        assert {name: list(tracks) for name, tracks in parts.items()} == {
            "router": ["take", "write"],
            "tokenizer": ["tokenize"],
            "compute": ["plan", "launch", "wait", "commit", "send", "step"],
            "detokenizer": ["detokenize"],
        }
        for tracks in parts.values():
            assert all(len(track.began_s) for track in tracks.values())
        (ids,) = parts["tokenizer"]["tokenize"].args
        assert ids.values.tolist() == [5]
        assert len(parts["compute"]["step"].began_s) >= 12
        assert sum(parts["detokenizer"]["detokenize"].args[0].values) >= 12


async def test_what_experts_were_given_is_there_too(folder: Path) -> None:
    experts = ExpertLoad(uint32s((3,)), uint64s((7, 9)))
    async with whole_ring(folder) as ring:
        for worker in ring.router().dispatch.fleet.workers():
            worker.experts = experts if worker.service == "compute" else None
        async with ring.sessions["router"].get("/timeline") as response:
            timeline = unpack(Timeline, await response.read())
    assert {part.name: part.experts for part in timeline.parts if part.experts} == {
        "compute": experts
    }


async def test_only_the_last_seconds_are_shown(folder: Path) -> None:
    async with whole_ring(folder) as ring:
        await generate(ring)
        await ring.pass_time(3.0)
        assert not (await timeline_of(ring, seconds="2.5"))["compute"]["plan"].began_s
        assert (await timeline_of(ring, seconds="60"))["compute"]["plan"].began_s


async def test_the_heartbeat_carries_the_steps_times(folder: Path) -> None:
    async with whole_ring(folder) as ring:
        await generate(ring)
        await ring.pass_time(1.5)
        (worker,) = [each for each in ring.router().dispatch.fleet.workers() if each.load.steps]
        report = worker.load.steps
        assert report is not None
        assert worker.name == "compute"
        assert report.num_samples >= 12
        assert report.num_prefill_tokens == 5
        names = [name for name, _, _ in report.times]
        assert names == ["plan", "launch", "wait", "commit", "send", "host", "device"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9", "soon"])
async def test_a_time_that_makes_no_sense_is_refused(folder: Path, seconds: str) -> None:
    async with whole_ring(folder) as ring:
        path = "/timeline"
        async with ring.sessions["router"].get(path, params={"seconds": seconds}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "seconds"
