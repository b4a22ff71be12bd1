"""The stages of a pipeline, seen from the process that leads, which is the last of them.

The others are its children, or were started on other hosts and wait for it there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import structlog
import zmq
from pydantic import BaseModel, ConfigDict

from common.child_process import start_child
from common.config import LinkSettings, TelemetrySettings
from common.errors import EXIT_CONFIG, EXIT_FATAL, ConfigError, FatalError
from common.link.resolve import tcp_place
from common.telemetry.log import Identity
from services.compute.config import ComputeSettings
from services.compute.distributed.stage_link import END, Kind, StageLink, send
from services.compute.runner.group import limits_of
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.stage_place import StagePlace, keys_for, literal
from services.compute.step import Int32Array

LOOK_S = 0.25  # between two looks at whether children live
ENDS_WITHIN_S = 1.0
LAST_LINE_S = 0.05  # for the log
STAGE = "services.compute.runner.stage"


class StageStart(BaseModel):
    """What a stage is sent first: which one it is and what it has to load."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    inboxes: tuple[str, ...]  # of all stages, in the order of layers
    folder: Path
    settings: ComputeSettings
    process: dict[str, str]  # that it logs as, with its number
    telemetry: TelemetrySettings

    def place(self, links: LinkSettings) -> StagePlace:
        are_here = not self.settings.pipeline_stages
        return StagePlace(number=self.number, inboxes=self.inboxes, are_here=are_here, links=links)


class StageGroup:
    """Starts the other stages, sends them frames, and ends this process with any of them.

    It calls `end` with the status of the process, in a thread: the main one may wait for a stage.
    """

    def __init__(
        self,
        folder: Path,
        settings: ComputeSettings,
        links: LinkSettings,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._end = end
        self._log = structlog.get_logger()
        self._closing = threading.Event()
        self._children: list[subprocess.Popen[bytes]] = []
        self._watcher = threading.Thread(target=self._watch, name="children", daemon=True)
        self._outboxes: list[zmq.Socket[bytes]] = []  # to the other stages
        self._sockets_dir = ""  # until all are connected
        *others, own = inboxes = self._inboxes(settings)
        self._link = StageLink(keys_for(own, links), self._lost)
        try:
            self._link.bind(literal(own))
            for number, inbox in enumerate(others):
                if not settings.pipeline_stages:
                    self._children.append(start_child(STAGE, (inbox,), (), own_session=False))
                outbox = self._link.connect(literal(inbox))
                start = self._start(number, inboxes, folder, settings)
                send(outbox, Kind.START, start.model_dump_json().encode())
                self._outboxes.append(outbox)
            self.place = self._start(len(others), inboxes, folder, settings).place(links)
            self.stages = self.place.linked(self._link)
        except BaseException:
            self.close()
            raise
        self._watcher.start()

    def wait_until_ready(self, spec: RunnerSpec) -> None:
        """Wait for all to have loaded; FatalError if one has loaded anything else than this one."""
        for _ in self._outboxes:
            number, payload = self._link.take(Kind.READY)
            limits = np.frombuffer(payload, np.int64).tolist()
            if limits != limits_of(spec):
                raise FatalError(
                    f"stage {number} has loaded a model of other limits than the last one: "
                    f"{limits}, and not {limits_of(spec)}"
                )
        self._remove_sockets()

    def send(self, kind: int, ints: Int32Array) -> None:
        """Have all other stages make a call."""
        for outbox in self._outboxes:
            send(outbox, Kind.CALL, ints, kind)

    def close(self) -> None:
        """End the other stages."""
        self._closing.set()
        for outbox in self._outboxes:
            send(outbox, Kind.CALL, number=END)
        self._link.close()
        for child in self._children:
            try:
                child.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:  # it still loads, or is stopped
                child.kill()
                child.wait()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.close()
            child.stdout.close()
        if self._watcher.is_alive():
            self._watcher.join()
        self._remove_sockets()

    def _inboxes(self, settings: ComputeSettings) -> tuple[str, ...]:
        """Of all stages; those of children are in a folder that nobody else can enter."""
        count = settings.pipeline_parallel_size
        if not settings.pipeline_stages:
            self._sockets_dir = tempfile.mkdtemp(prefix="slipstream-stages-")
            return tuple(f"ipc://{self._sockets_dir}/{number}" for number in range(count))
        for inbox in settings.pipeline_stages:
            if tcp_place(inbox) is None:
                raise ConfigError(
                    f"compute.pipeline_stages: {inbox} is not tcp://ADDRESS:PORT, which each stage "
                    "needs to be found on its host."
                )
        if len(settings.pipeline_stages) != count:
            raise ConfigError(
                f"compute.pipeline_stages has {len(settings.pipeline_stages)} addresses, and "
                f"compute.pipeline_parallel_size is {count}; each stage has one, this process the "
                "last."
            )
        return settings.pipeline_stages

    @staticmethod
    def _start(
        number: int, inboxes: tuple[str, ...], folder: Path, settings: ComputeSettings
    ) -> StageStart:
        identity = Identity.of_this_process()
        cores = {"core": -1, "follower_cores": ()}  # those of the settings are for this stage
        return StageStart(
            number=number,
            inboxes=inboxes,
            folder=folder,
            settings=settings.model_copy(update=cores),
            process=dict(identity.process),
            telemetry=identity.telemetry,
        )

    def _remove_sockets(self) -> None:
        """What is connected stays so; nothing else has to come."""
        if self._sockets_dir:
            shutil.rmtree(self._sockets_dir, ignore_errors=True)

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            if any(child.poll() is not None for child in self._children):
                self._lost()

    def _lost(self) -> None:
        if self._closing.is_set():
            return
        self._log.critical("a stage is lost, and all end")
        time.sleep(LAST_LINE_S)
        cannot_load = any(child.poll() == EXIT_CONFIG for child in self._children)
        self._end(EXIT_CONFIG if cannot_load else EXIT_FATAL)
