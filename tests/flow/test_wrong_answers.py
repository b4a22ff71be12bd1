"""A replica whose logits are not finite, or whose steps take far too long: nobody is told nonsense,
and it is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from services.compute.actor import ComputeActor
from services.compute.replica_health import MIN_NONFINITE, SLOW_RATIO, WINDOW_S
from services.compute.runner.sim import SimTicket
from services.compute.step import StepResult
from tests.flow.ring_client import Client
from tests.flow.whole_ring import WholeRing, save_vocabulary, whole_ring

NAMES = ("tokenizer", "compute1", "compute2", "detokenizer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vocabulary(tmp_path_factory.mktemp("hex"))


def results_of(ring: WholeRing, name: str, change: Callable[[StepResult, Any], StepResult]) -> None:
    """Change what the device of a compute answers from now on."""
    runner: Any = ring.devices[name].runner
    right = type(runner).result

    def changed(ticket: SimTicket) -> StepResult:
        return change(right(runner, ticket), ticket.plan)

    runner.result = changed


def wrong_from(index: int) -> Callable[[StepResult, Any], StepResult]:
    """Logits are not finite from an answer's token of this number on."""

    def change(result: StepResult, plan: Any) -> StepResult:
        wrong = plan.sample_index >= index
        tokens = np.where(wrong[:, None], 0, result.tokens)
        return replace(result, nonfinite=wrong, n_valid=result.n_valid * ~wrong, tokens=tokens)

    return change


def take(seconds: float, computed_s: float = nan) -> Callable[[StepResult, Any], StepResult]:
    def change(result: StepResult, plan: Any) -> StepResult:
        start_s = result.device_end_s - seconds
        return replace(result, device_start_s=start_s, computed_s=computed_s)

    return change


async def answers(ring: WholeRing, seeds: range, **fields: Any) -> list[Client]:
    clients = [Client(seed, 20, streaming=bool(seed % 3), **fields).start(ring) for seed in seeds]
    await ring.until(lambda: all(client.is_over for client in clients), time_passes=True)
    for client in clients:
        client.check()
    return clients


async def get(ring: WholeRing, path: str) -> tuple[int, Any]:
    async with ring.sessions["router"].get(path) as response:
        return response.status, await response.json()


def number_of_steps(ring: WholeRing, name: str) -> int:
    actor = ring.stations[name].actor
    assert isinstance(actor, ComputeActor)
    return actor._engine.stats.num_steps


@pytest.mark.parametrize("index", [0, 7])
async def test_a_stream_whose_logits_are_not_finite_goes_on_at_another_replica(
    folder: Path, index: int
) -> None:
    async with whole_ring(folder, *NAMES) as ring:
        results_of(ring, "compute1", wrong_from(index))
        for client in await answers(ring, range(4), num_choices=2):
            assert client.num_errors == 0
            assert client.usage is not None and client.usage["completion_tokens"] == 40
        assert ring.router().dispatch.inflight.stats["sim"].num_retries
        await ring.pass_time(3.0)
        assert ring.leftovers() == {}


async def test_a_replica_that_answers_wrongly_is_left_alone_and_named(folder: Path) -> None:
    async with whole_ring(folder, *NAMES) as ring:
        results_of(ring, "compute1", wrong_from(3))
        with structlog.testing.capture_logs() as lines:
            for first in range(0, 4 * MIN_NONFINITE, 2):
                await answers(ring, range(first, first + 2))
            await ring.pass_time(1.0)
        said = [line["why"] for line in lines if line["event"].startswith("unhealthy")]
        assert len(said) == 1 and "non-finite logits in" in said[0]
        status, health = await get(ring, "/health")
        assert (status, health["status"]) == (200, "ok")
        troubles = {each["name"]: each.get("trouble") for each in health["instances"]}
        assert troubles.pop("compute1") in said
        assert set(troubles.values()) == {None}
        before = number_of_steps(ring, "compute1")
        await answers(ring, range(40, 48))
        assert number_of_steps(ring, "compute1") == before

        results_of(ring, "compute1", lambda result, plan: result)
        await ring.pass_time(WINDOW_S + 1.0)  # it is tried again
        await answers(ring, range(50, 58))
        assert number_of_steps(ring, "compute1") > before
        assert "trouble" not in str(await get(ring, "/health"))


@pytest.mark.parametrize("names", [NAMES, ("tokenizer", "compute1", "detokenizer")])
async def test_what_is_wrong_twice_fails_with_500_and_an_ill_server_is_not_ready(
    folder: Path, names: tuple[str, ...]
) -> None:
    async with whole_ring(folder, *names) as ring:
        computes = [name for name in names if name.startswith("compute")]
        for name in computes:
            results_of(ring, name, wrong_from(2))
        clients = await answers(ring, range(2 * MIN_NONFINITE))
        for client in clients:
            assert client.num_errors == 1
            assert client.status == (200 if client.streaming else 500)
        await ring.pass_time(1.0)
        status, ready = await get(ring, "/ready")
        assert (status, ready["status"]) == (503, "unhealthy")
        for name in computes:
            results_of(ring, name, lambda result, plan: result)
        for client in await answers(ring, range(10, 12)):  # it serves all the same
            assert client.num_errors == 0
        await ring.pass_time(2 * WINDOW_S)
        assert (await get(ring, "/ready"))[0] == 200
        assert ring.leftovers() == {}


async def test_a_replica_whose_steps_take_ten_times_as_long_is_left_alone(folder: Path) -> None:
    async with whole_ring(folder, *NAMES) as ring:
        results_of(ring, "compute1", take(0.2))
        await answers(ring, range(8))
        results_of(ring, "compute1", take(0.22 * SLOW_RATIO))
        await answers(ring, range(8, 16))
        await ring.pass_time(1.0)
        _, health = await get(ring, "/health")
        (ill,) = (each for each in health["instances"] if "trouble" in each)
        assert (ill["name"], ill["trouble"]) == (
            "compute1",
            "a step took 2.2 s; 0.2 s were expected",
        )
        before = number_of_steps(ring, "compute1")
        await answers(ring, range(20, 24))
        assert number_of_steps(ring, "compute1") == before


async def test_a_replica_whose_machine_does_not_let_it_compute_is_not_ill(folder: Path) -> None:
    async with whole_ring(folder, "tokenizer", "compute1", "detokenizer") as ring:
        results_of(ring, "compute1", take(0.2, computed_s=0.2))
        await answers(ring, range(8))
        results_of(ring, "compute1", take(0.22 * SLOW_RATIO, computed_s=0.25))
        await answers(ring, range(8, 16))
        await ring.pass_time(1.0)
        assert (await get(ring, "/ready"))[0] == 200
        assert "trouble" not in str(await get(ring, "/health"))
