"""The group: the processes of one replica, seen from its leader. It lives and dies as one."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import structlog
from pydantic import BaseModel, ConfigDict

from common.child_main import CHUNK_BYTES, FrameReader, framed
from common.child_process import start_child
from common.config import TelemetrySettings
from common.errors import EXIT_CONFIG, EXIT_FATAL, FatalError
from common.host import is_stopped, shared_memory
from common.telemetry.line_writer import STDERR
from common.telemetry.log import Identity
from services.compute.config import ComputeSettings
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.stage_place import StagePlace
from services.compute.runner.upload_ring import RingMemory, RingWriter
from services.compute.step import Int32Array

LOOK_S = 0.25  # between two looks at whether followers get on
MAX_BAD_LOOKS = 3  # in a row; counted, since the whole machine may have stood still in between
CLOSED_WITHIN_S = 1.0
ENDS_WITHIN_S = 1.0
LAST_LINE_S = 0.05  # for the log
FOLLOWER = "services.compute.runner.follower"


class FollowerStart(BaseModel):
    """What a follower gets on its standard input: who it is and what it has to load."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    leader_pid: int
    rank: int
    store_fd: int
    ring_fd: int
    ring_ints: int
    folder: Path
    settings: ComputeSettings
    place: StagePlace | None  # of a stage's rank
    process: dict[str, str]  # that it logs as, with its rank
    telemetry: TelemetrySettings

    @staticmethod
    def take(frames: Iterator[bytes]) -> FollowerStart | None:
        """Read it; None if the leader ended before this process could have noticed."""
        for frame in frames:
            start = FollowerStart.model_validate_json(frame)
            return start if start.leader_pid == os.getppid() else None
        return None

    @property
    def store(self) -> str:
        return _path_of(self.store_fd)

    def watch_leader(self) -> None:
        """Have a thread kill a leader that is stopped, which ends this process, too."""
        threading.Thread(target=self._watch_leader, name="leader", daemon=True).start()

    def _watch_leader(self) -> None:
        num_bad_looks = 0
        while num_bad_looks < MAX_BAD_LOOKS:
            time.sleep(LOOK_S)
            num_bad_looks = num_bad_looks + 1 if is_stopped(self.leader_pid) else 0
        structlog.get_logger().critical("the leader is stopped, and the group ends")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.leader_pid, signal.SIGKILL)


def limits_of(spec: RunnerSpec) -> list[int]:
    """What the leader's scheduler relies on, and all ranks have to have alike."""
    return [
        spec.vocab_size,
        spec.max_model_len,
        spec.num_pages,
        spec.num_host_pages,
        spec.max_num_seqs,
        spec.max_step_tokens,
    ]


@dataclass(slots=True)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes]
    reports: FrameReader = field(default_factory=FrameReader)
    limits: list[int] = field(default_factory=list)  # of what it has loaded, once it has
    num_handled: int = 0
    num_bad_looks: int = 0  # in a row

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which its other pipe says
            self.process.stdin.write(data)


class FollowerGroup:
    """Starts the followers, sends them frames, and ends this process with any of them.

    A thread watches them: the main one may be in a collective operation, which never ends without
    all ranks. It calls `end` with the status of the process.
    """

    def __init__(
        self,
        folder: Path,
        settings: ComputeSettings,
        end: Callable[[int], object] = os._exit,
        module: str = FOLLOWER,
        place: StagePlace | None = None,
    ) -> None:
        self._end = end
        self._module = module
        self._place = place
        self._log = structlog.get_logger()
        self._closing = False
        self._all_ready = threading.Event()
        self._overlaps = False
        self._num_done = 0  # of the frames, by this rank itself
        self._store_fd = shared_memory("slipstream-ranks", 0)
        self._memory = RingMemory.create(settings.num_ranks - 1)
        self._ring = RingWriter(self._memory, lambda reader: self._followers[reader].send(b"!"))
        self._selector = selectors.DefaultSelector()
        self._followers: list[_Follower] = []
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, settings.num_ranks):
                self._start(rank, folder, settings)
        except BaseException:
            self.close()
            raise
        self._thread.start()

    @property
    def store(self) -> str:
        """The file through which ranks find each other."""
        return _path_of(self._store_fd)

    def wait_until_ready(self, spec: RunnerSpec) -> None:
        """Wait for all to have loaded; FatalError if one has loaded anything else than this rank.

        It has no bound of its own: a follower that fails ends this process, and one that hangs in
        its start makes this one seem to, for whoever supervises it.
        """
        self._all_ready.wait()
        for follower in self._followers:
            if follower.limits != limits_of(spec):
                raise FatalError(
                    f"rank {follower.rank} has loaded a model of other limits than rank 0: "
                    f"{follower.limits}, and not {limits_of(spec)}"
                )
        self._overlaps = spec.overlaps

    def send(self, kind: int, ints: Int32Array) -> None:
        """Have all followers make a call."""
        self._ring.write(kind, ints)

    def sent_is_done(self) -> None:
        """This rank has made all calls that were sent."""
        self._num_done = self._ring.num_frames

    def close_after(self, error: BaseException) -> None:
        """End the followers after an error in the start.

        Where another rank is lost, the watch knows why, and ends this process with that reason.
        """
        if isinstance(error, FatalError):
            self._thread.join(ENDS_WITHIN_S)
        self.close()

    def close(self) -> None:
        """End the followers."""
        self._closing = True
        for follower in self._followers:
            assert follower.process.stdin is not None
            follower.process.stdin.close()
        for follower in self._followers:
            # One that still loads, or is stopped, would not see that it should end.
            would_see = follower.limits and not follower.num_bad_looks
            _end_of(follower.process, CLOSED_WITHIN_S if would_see else 0.0)
        if self._thread.is_alive():
            self._thread.join()
        for follower in self._followers:
            assert follower.process.stdout is not None
            follower.process.stdout.close()
        self._selector.close()
        self._memory.close()
        os.close(self._store_fd)

    def _start(self, rank: int, folder: Path, settings: ComputeSettings) -> None:
        fds = self._memory.fd, self._store_fd
        process = start_child(self._module, (), fds, own_session=False)
        follower = _Follower(rank, process)
        self._followers.append(follower)
        identity, cores = Identity.of_this_process(), settings.follower_cores
        own = {"core": cores[rank - 1] if rank <= len(cores) else -1, "record_dir": ""}
        start = FollowerStart(
            leader_pid=os.getpid(),
            rank=rank,
            store_fd=self._store_fd,
            ring_fd=self._memory.fd,
            ring_ints=len(self._memory.ints),
            folder=folder,
            settings=settings.model_copy(update=own),
            place=self._place,
            process=identity.process,
            telemetry=identity.telemetry,
        )
        follower.send(framed(start.model_dump_json().encode()))
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, follower)

    def _watch(self) -> None:
        look_at_s = time.monotonic() + LOOK_S
        while not self._closing:
            for key, _ in self._selector.select(max(0.0, look_at_s - time.monotonic())):
                self._hear(key.data)
            if time.monotonic() >= look_at_s:
                look_at_s = time.monotonic() + LOOK_S
                for follower in self._followers:
                    self._look_at(follower)

    def _hear(self, follower: _Follower) -> None:
        assert follower.process.stdout is not None
        data = os.read(follower.process.stdout.fileno(), CHUNK_BYTES)
        if not data:
            self._selector.unregister(follower.process.stdout)
            status = _end_of(follower.process, LAST_LINE_S)
            self._end_with(follower, f"ended with status {status}", EXIT_FATAL)
        for payload in follower.reports.feed(data):
            report, content = msgpack.unpackb(payload)
            if report == "ready":
                follower.limits = content
            elif not self._closing:
                os.write(STDERR, f"slipstream compute: {content}\n".encode())
                self._end_with(follower, "cannot load", EXIT_CONFIG)
        if all(each.limits for each in self._followers):
            self._all_ready.set()

    def _look_at(self, follower: _Follower) -> None:
        """Count the looks at which a follower is stopped, or has not got on with what it owes.

        It owes what this rank has done. Where the host computes that says nothing: a process that
        gets no processor is not at fault. There only who waits for it can tell, and this rank does;
        if it hangs with it, its supervisor ends it as any that sleeps.
        """
        num_handled = self._ring.num_handled(follower.rank - 1)
        is_behind = num_handled == follower.num_handled < self._num_done
        follower.num_handled = num_handled
        stopped = is_stopped(follower.process.pid)
        is_bad = stopped or (self._overlaps and is_behind)
        follower.num_bad_looks = follower.num_bad_looks + 1 if is_bad else 0
        if follower.num_bad_looks >= MAX_BAD_LOOKS:
            self._end_with(follower, "is stopped" if stopped else "hangs", EXIT_FATAL)

    def _end_with(self, follower: _Follower, how: str, status: int) -> None:
        if self._closing:
            return
        self._log.critical("a rank is lost, and the group ends", rank=follower.rank, how=how)
        time.sleep(LAST_LINE_S)
        self._end(status)


def _path_of(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _end_of(process: subprocess.Popen[bytes], within_s: float) -> int:
    """Kill a process that has not ended in this time; returns its status."""
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
