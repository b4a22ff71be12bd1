"""The Ray actor of one replica, here without Ray: it starts, restarts and ends a real process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.stack import children_of, command_line
from common.link.curve import keys_for, new_keys
from services.launcher.on_ray.places import needs_of
from services.launcher.on_ray.service_process import Assignment, Report, ServiceProcess
from services.launcher.plan import Counts, make_plan
from tests.patience import PATIENCE_S


def here() -> tuple[str, str]:
    return "node", "127.0.0.1"


def assignment(service: str, **env: str) -> Assignment:
    variables = {f"SLIPSTREAM_{name.upper()}": value for name, value in env.items()}
    plan = make_plan(None, {"SLIPSTREAM_ROUTER__PORT": "0", **variables}, {}, Counts())
    return Assignment(plan, needs_of(plan, False), keys_for(service, new_keys()), "launch")


async def reported(
    actor: ServiceProcess, routers: list[str], true: Callable[[Report], bool]
) -> Report:
    """Ask until the answer is as it should be."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            report = await actor.report(routers)
            if report is not None and true(report):
                return report
            await asyncio.sleep(0.02)


def listens(report: Report) -> bool:
    with socket.socket() as probe:
        port = report.inbox.rpartition(":")[2]
        return bool(port) and probe.connect_ex((report.host, int(port))) == 0


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where runs make their folders: a short path, as sockets have to fit beside it."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_a_replica_starts_its_process_again_and_drains_it(
    parent: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = assignment("router")

    def files(pattern: str) -> list[Path]:
        return sorted(parent.glob(f"*/{pattern}"))

    async def main() -> None:
        actor = ServiceProcess("router-0", here)
        assert await actor.report([]) is None
        await actor.begin(given)
        first = await reported(actor, [], listens)
        assert [path.name for path in files("keys/*.secret")] == ["router.secret", "server.secret"]
        (pid,) = (pid for pid in children_of(os.getpid()) if "router-0" in command_line(pid))
        os.kill(pid, signal.SIGKILL)
        is_new = lambda report: report.inbox != first.inbox  # noqa: E731
        second = await reported(actor, ["tcp://10.0.0.1:1"], is_new)
        assert second.url == first.url
        await reported(actor, [], listens)
        await reported(actor, ["tcp://10.0.0.2:1"], lambda report: True)
        assert [path.read_text() for path in files("routers")] == ["tcp://10.0.0.2:1"]
        await actor.end(urgent=False)
        assert files("*") == []

    asyncio.run(main())
    written = capfd.readouterr().err
    assert "died; starting it again" in written and "killed by SIGKILL" in written
    assert not any(key.decode() in written for key in given.keys.values())


@pytest.mark.parametrize(
    ("setting", "value", "complaint"),
    [
        ("model__path", "/no/model", "there is no folder /no/model; check the model's path"),
        ("tokenizer__chat_template", "/no/template", "the chat template /no/template cannot be"),
    ],
)
async def test_a_replica_that_cannot_work_says_why_and_is_left_alone(
    setting: str, value: str, complaint: str
) -> None:
    actor = ServiceProcess("tokenizer-0", here)
    await actor.begin(assignment("tokenizer", **{setting: value}))
    report = await reported(actor, [], lambda report: bool(report.failed))
    assert report.failed == 78
    assert complaint in report.complaint
