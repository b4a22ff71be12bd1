"""Processes of the pool that do what a test says, in the order in which it says it."""

from __future__ import annotations

from array import array

from common.child_main import HEADER, pack_frame
from common.child_process import Exited, Received
from common.link.codec import unpack
from common.messages.failure import Failure
from common.tokenized import ExpectedAnswer
from services.tokenizer.jobs import Job, Outcome, pack_outcome

NO_ANSWER = ExpectedAnswer()


class ScriptedProcess:
    """Keeps the jobs it was given; `answer`, `fail` and `die` are the test's to call."""

    is_stopped = False

    def __init__(self, received: Received, exited: Exited) -> None:
        self._received = received
        self._exited = exited
        self.jobs: list[Job] = []
        self.killed = self.closed = False
        self.alive = True
        self.is_ready = False
        self.working = False

    def send(self, frame: bytes) -> None:
        assert self.is_ready and not self.working, "one job at a time, and not before it is ready"
        self.working = True
        self.jobs.append(unpack(Job, frame[HEADER.size :]))

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True

    def ready(self) -> None:
        self.is_ready = True
        self._report(pack_frame(["ready"]))

    def cannot_load(self, why: str) -> None:
        self._report(pack_frame(["broken", why]))

    def answer(
        self, *ids: int, strs: tuple[str, ...] = (), answer: ExpectedAnswer = NO_ANSWER
    ) -> None:
        self.working = False
        self._report(pack_outcome(Outcome(array("i", ids), strs, answer=answer)))

    def fail(self, failure: Failure, retiring: bool = False) -> None:
        self.working = False
        self._report(pack_outcome(Outcome(array("i"), failure=failure, retiring=retiring)))

    def die(self, status: int = -9) -> None:
        self.alive = self.working = False
        self._exited(status)

    def _report(self, frame: bytes) -> None:
        self._received(frame[HEADER.size :])


class Processes:
    """All processes that were started, oldest first; `spawn` is what a pool takes."""

    def __init__(self) -> None:
        self.started: list[ScriptedProcess] = []

    def spawn(self, received: Received, exited: Exited) -> ScriptedProcess:
        process = ScriptedProcess(received, exited)
        self.started.append(process)
        return process

    def all_ready(self) -> None:
        for process in self.started:
            process.ready()

    def busy(self) -> list[ScriptedProcess]:
        """Those that were ever given a job."""
        return [process for process in self.started if process.jobs]


class HandClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
