"""A deployment on several hosts of this machine: network namespaces with addresses of their own.

The services of one ring run in them, one by one, over tcp with CURVE keys. A host can be cut off in
two ways: its packets vanish, or its interface goes down. What dies is started again, as an engine
of containers does it, and what hangs is killed. Needs root and `ip`; `why_not` says what lacks.

Clients reach the router at 127.0.0.1 whatever is cut: its listening socket is made outside.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stack import CLOSED_WITHIN_S, ROOT, StackError, is_running
from common.beacon import is_ready, read_beacon
from common.link.curve import create_keys

PREFIX = "slipstream-"  # of namespaces; the id of the process that made them follows
NETWORK = "198.18"  # RFC 2544: for tests of networks; the process id chooses a part of it
ROUTER_PORT, FIRST_PORT = 7000, 7001
READY_WITHIN_S = 240.0
POLL_S = 0.1
RESTART_S = 0.3
SETTINGS = """
[model]
path = "{model}"
[links]
run_dir = "{run_dir}"
curve_dir = "{keys}"
routers = ["{router}"]
[telemetry]
log_format = "json"
"""


@functools.cache
def why_not() -> str:
    """Say why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` of iproute2"
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "try0", "type", "veth", "peer", "name", "try1")
    except OSError as error:
        return f"no network namespaces here: {error}"
    finally:
        with contextlib.suppress(OSError):
            _ip("netns", "delete", name)
    return ""


def _ip(*arguments: str) -> str:
    """Run `ip`; OSError with what it says if it fails."""
    ran = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if ran.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout


def remove_abandoned() -> None:
    """End and remove what runs that were killed have left."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        found = re.fullmatch(re.escape(PREFIX) + r"(\d+)-\w+", name)
        if found is not None and not is_running(int(found[1])):
            _remove(name)


def _remove(namespace: str) -> None:
    with contextlib.suppress(OSError):  # another run removes it
        for pid in _ip("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", namespace)


class Network:
    """A switch and the hosts at it, each with an address."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._name = f"{PREFIX}{os.getpid()}"
        self._switch = f"{self._name}-switch"
        subnet = f"{NETWORK}.{os.getpid() % 250}"
        self.addresses = {host: f"{subnet}.{number}" for number, host in enumerate(hosts, 1)}
        remove_abandoned()
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for host in hosts:
            self._connect(host)
        for host in hosts:
            self._know_neighbours(host)

    def namespace(self, host: str) -> str:
        """Return the name of a host's namespace."""
        return f"{self._name}-{host}"

    def _connect(self, host: str) -> None:
        name, number = self.namespace(host), self.addresses[host].rpartition(".")[2]
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        wire = ("link", "add", f"port{number}", "type", "veth", "peer", "name", "wire")
        _ip("-n", self._switch, *wire, "netns", name)
        _ip("-n", name, "link", "set", "wire", "address", self._mac(host))
        _ip("-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", "wire")
        _ip("-n", name, "link", "set", "wire", "up")
        _ip("-n", self._switch, "link", "set", f"port{number}", "master", "switch", "up")

    def _mac(self, host: str) -> str:
        return f"02:00:00:00:00:{int(self.addresses[host].rpartition('.')[2]):02x}"

    def _know_neighbours(self, host: str) -> None:
        """Spare a host the question where another is, whose missing answer is an error at once."""
        for other, address in self.addresses.items():
            if other != host:
                place = ("lladdr", self._mac(other), "dev", "wire", "nud", "permanent")
                _ip("-n", self.namespace(host), "neighbour", "replace", address, *place)

    def drop(self, host: str) -> None:
        """Have every packet from and to a host vanish: nobody is told."""
        number = self.addresses[host].rpartition(".")[2]
        _ip("-n", self._switch, "link", "set", f"port{number}", "nomaster")

    def take_down(self, host: str) -> None:
        """Take a host's interface down: its own packets are refused at once, others' vanish."""
        _ip("-n", self.namespace(host), "link", "set", "wire", "down")

    def heal(self, host: str) -> None:
        """Undo both."""
        number = self.addresses[host].rpartition(".")[2]
        _ip("-n", self.namespace(host), "link", "set", "wire", "up")
        self._know_neighbours(host)
        _ip("-n", self._switch, "link", "set", f"port{number}", "master", "switch")

    def left(self) -> list[str]:
        """Name what is there of it, after its end."""
        return [f"namespace {name}" for name in _ip("netns", "list").split() if self._name in name]

    def close(self) -> None:
        """Remove all of it, and end what still runs there."""
        for namespace in (*map(self.namespace, self.addresses), self._switch):
            _remove(namespace)


@dataclass(slots=True, eq=False)
class Instance:
    """One service process of a host, through all restarts."""

    name: str
    host: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path
    run_dir: str
    endpoint: str  # as /health names it: host and port
    pass_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    restart_at_s: float = 0.0
    statuses: list[int] = field(default_factory=list)  # of processes that have ended

    @property
    def pid(self) -> int:
        """The process that runs now, 0 if none does."""
        return 0 if self.process is None else self.process.pid

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.env),
                pass_fds=self.pass_fds,
                start_new_session=True,
            )

    def keep(self, now_s: float) -> None:
        """Start it again if it has died, and kill it if it hangs."""
        if self.process is None:
            if now_s >= self.restart_at_s:
                self.start()
        elif self.process.poll() is not None:
            self.statuses.append(self.process.returncode)
            self.kill()  # and its children
            self.process, self.restart_at_s = None, now_s + RESTART_S
        else:
            beacon = read_beacon(self.run_dir, self.name)
            if beacon is not None and beacon.pid == self.pid and beacon.hangs(now_s):
                self.kill()

    def kill(self) -> None:
        """End it and its children at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def is_ready(self) -> bool:
        return is_ready(self.run_dir, self.name, time.monotonic())


class Hosts:
    """One ring on several hosts; `layout` says which instances run on each of them.

    `settings` are `table.field` names with their values. The router is `router-0`.
    """

    def __init__(
        self, folder: Path, layout: Mapping[str, Sequence[str]], settings: Mapping[str, object]
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="slipstream-hosts-")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._closing = threading.Event()
        self._alive = os.pipe()  # what these services take for their launcher
        self.network = Network(list(layout))
        self.instances: dict[str, Instance] = {}
        try:
            keys = Path(self._scratch.name, "keys")
            create_keys(keys)
            for host, names in layout.items():
                run_dir = Path(self._scratch.name, host)
                run_dir.mkdir(mode=0o700)
                (run_dir / "settings.toml").write_text(
                    SETTINGS.format(
                        model=folder,
                        run_dir=run_dir,
                        keys=keys,
                        router=self._inbox("router-0", self._host_of("router-0", layout)),
                    )
                )
                for name in names:
                    self._add(name, host, run_dir, settings)
            self._keeper = threading.Thread(target=self._keep, daemon=True)
            self._keeper.start()
            self.wait_until(lambda: all(each.is_ready for each in self.instances.values()), "ready")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _host_of(name: str, layout: Mapping[str, Sequence[str]]) -> str:
        return next(host for host, names in layout.items() if name in names)

    def _inbox(self, name: str, host: str) -> str:
        port = ROUTER_PORT if name == "router-0" else FIRST_PORT + len(self.instances)
        return f"tcp://{self.network.addresses[host]}:{port}"

    def _add(self, name: str, host: str, run_dir: Path, settings: Mapping[str, object]) -> None:
        env = {key: text for key, text in os.environ.items() if not key.startswith("SLIPSTREAM_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {
            "SLIPSTREAM_" + key.replace(".", "__").upper(): str(value)
            for key, value in settings.items()
            if key.partition(".")[0] == name.partition("-")[0]
        }
        env["SLIPSTREAM_LINKS__BIND"] = self._inbox(name, host)
        env["SLIPSTREAM_LAUNCHER_FD"] = str(self._alive[0])
        fds = [self._alive[0]]
        if name == "router-0":
            env["SLIPSTREAM_LISTEN_FD"] = str(self._listener.fileno())
            fds.append(self._listener.fileno())
        service = name.partition("-")[0]
        enter = ("ip", "netns", "exec", self.network.namespace(host))
        command = (*enter, sys.executable, "-m", f"services.{service}", "--name", name)
        self.instances[name] = Instance(
            name,
            host,
            (*command, "--config", str(run_dir / "settings.toml")),
            env,
            Path(self._scratch.name, f"{name}.log"),
            str(run_dir),
            env["SLIPSTREAM_LINKS__BIND"].removeprefix("tcp://"),
            tuple(fds),
        )

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def health(self) -> dict[str, Any]:
        """Return the router's view of the ring."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60.0) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def log(self, name: str = "") -> str:
        """Return all that the processes of an instance have logged, or those of all."""
        paths = [each.log_path for each in self.instances.values() if name in ("", each.name)]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition to hold; StackError with the ends of all logs if not."""
        deadline_s = time.monotonic() + READY_WITHIN_S
        while not condition():
            if time.monotonic() > deadline_s:
                ends = "\n".join(f"{name}: {self.log(name)[-1500:]}" for name in self.instances)
                raise StackError(f"not {what} within {READY_WITHIN_S:g} s\n{ends}")
            time.sleep(POLL_S / 2)

    def close(self) -> None:
        """Drain everything, end what does not, and remove the hosts; may be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        if hasattr(self, "_keeper"):
            self._keeper.join()
        os.close(self._alive[1])
        for each in self.instances.values():
            if each.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(CLOSED_WITHIN_S)
                each.kill()
                each.process.wait()
        self.network.close()
        os.close(self._alive[0])
        self._listener.close()
        self._scratch.cleanup()

    def _keep(self) -> None:
        while not self._closing.wait(POLL_S):
            for each in self.instances.values():
                each.keep(time.monotonic())
