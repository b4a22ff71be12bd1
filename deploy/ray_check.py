"""Starts a Ray cluster of three nodes on this host and Slipstream on it, scales each service up and
down under a hundred streams, kills a node, and says what held.

Needs Ray beside Slipstream: pip install 'slipstream[ray]'. The nodes are raylets of their own with
three processors each, whatever the host has.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from deployment import CheckFailed
from ray.cluster_utils import Cluster
from streams import Load

NODES = 3
CPUS = 3
STREAMS = 100
STEPS = (  # of `slipstream scale`
    *("tokenizer=3", "tokenizer=1", "compute=4", "compute=2", "detokenizer=3", "detokenizer=1"),
    *("router=2", "router=1", "tokenizer=2", "detokenizer=2"),
)
READY_WITHIN_S = 180.0
STEP_S = 3.0
STEP_BASE_S = 0.05  # of `sim`
MEMORY = 80 << 20  # of a node's object store
READY = re.compile(r"at (http://\S+)/v1 \(ready after ([0-9.]+) s\)")


class Slipstream:
    """`slipstream serve --on ray` as a user would start it, with its output in files."""

    def __init__(self, address: str, folder: Path, *options: str, **settings: object) -> None:
        """`settings` are named as their variables are, without their beginning."""
        self._folder = folder
        self.port = port_of_two()
        self._scale = [sys.executable, "-m", "services.cli", "scale"]
        command = [sys.executable, "-m", "services.cli", "serve", "--on", "ray"]
        command += ["--address", address, "--port", str(self.port), *options]
        self.targets = folder / "targets.json"
        env = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(folder),  # other servers may run here
            "SLIPSTREAM_RAY__METRICS_TARGETS": str(self.targets),
            **{f"SLIPSTREAM_{name}": str(value) for name, value in settings.items()},
        }
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=env)

    def wait_ready(self) -> tuple[str, float]:
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            if found := READY.search((self._folder / "out").read_text()):
                return found[1], float(found[2])
            time.sleep(0.2)
        raise CheckFailed(f"it did not start: {(self._folder / 'err').read_text()[-4000:]}")

    def scale(self, *counts: str) -> str:
        (socket,) = self._folder.glob("*/control.sock")
        command = [*self._scale, *counts, "--run-dir", str(socket.parent)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ran.returncode:
            raise CheckFailed(f"scale {counts}: {ran.stderr}")
        return ran.stdout.strip().replace("\n", ", ")

    def num_serving(self, service: str) -> int:
        """How many processes serve, by the word of the first router; routers by their own."""
        if service != "router":
            return int(self._get(self.port, "/health").get("workers", {}).get(service, 0))
        return sum(self._get(self.port + i, "/ready").get("status") == "ok" for i in (0, 1))

    @staticmethod
    def _get(port: int, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            return {}

    def log(self) -> str:
        return (self._folder / "err").read_text()


@contextlib.contextmanager
def cluster_of(nodes: int) -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        for number in range(nodes):
            cluster.add_node(
                num_cpus=CPUS,
                object_store_memory=MEMORY,
                include_dashboard=False,
                node_name=f"node-{number}",
            )
        yield cluster
    finally:
        for node in cluster.list_all_nodes():
            node.kill_all_processes(check_alive=False, allow_graceful=False)


def port_of_two() -> int:
    """Find two free ports in a row that no connection gets by itself: those connect to nobody."""
    for port in random.sample(range(20_000, 30_000, 2), 100):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port
    raise CheckFailed("no two ports are free")


def descendants(pid: int) -> list[int]:
    """The processes below one, which a power cut would end with it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            columns = folder.read_text().rpartition(")")[2].split()
            children.setdefault(int(columns[1]), []).append(int(folder.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def actors() -> dict[str, Any]:
    """The actors of this launch by name, as Ray's own state has them."""
    return {
        actor["Name"]: actor
        for actor in ray._private.state.actors().values()
        if actor["ActorClassName"] == "ServiceProcess" and actor["State"] != "DEAD"
    }


def node_to_kill(cluster: Cluster, slipstream: Slipstream) -> tuple[Any, list[str]]:
    """Choose the node with the most workers of those without a router: its streams would die."""
    by_node: dict[str, list[str]] = {}
    for name, actor in actors().items():
        by_node.setdefault(actor["Address"]["NodeID"], []).append(name)
    candidates = [
        (names, node)
        for node in cluster.list_all_nodes()
        if (names := by_node.get(node.node_id, []))
        and not any(name.startswith("router") for name in names)
        and node is not cluster.head_node
    ]
    if not candidates:
        raise CheckFailed(f"no node has only workers: {by_node}")
    names, node = max(candidates, key=lambda each: len(each[0]))
    return node, sorted(names)


def kill_node(cluster: Cluster, slipstream: Slipstream) -> str:
    node, names = node_to_kill(cluster, slipstream)
    restarts = {name: int(actor["NumRestarts"]) for name, actor in actors().items()}
    raylet = node.all_processes["raylet"][0].process.pid
    victims = descendants(raylet)
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    began_s = time.monotonic()
    while time.monotonic() - began_s < READY_WITHIN_S:
        now = actors()
        again = [name for name in names if name in now and now[name]["State"] == "ALIVE"]
        if again == names and all(int(now[n]["NumRestarts"]) > restarts[n] for n in names):
            seconds = time.monotonic() - began_s
            lost = f"{len(victims)} processes with {', '.join(names)}"
            return f"{lost}; Ray has them again after {seconds:.0f} s"
        time.sleep(0.2)
    raise CheckFailed(f"not started again: {names}: {actors()}")


def secrets_of(pids: list[int]) -> set[bytes]:
    """The keys in the run folders of the services that run here."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--config" in words:
                config = Path(words[words.index(b"--config") + 1].decode())
                for path in (config.parent / "keys").glob("*.secret"):
                    if path.stat().st_mode & 0o077:
                        raise CheckFailed(f"{path} is open to others")
                    found.add(path.read_bytes().strip())
    return found


def no_key_in_logs(cluster: Cluster, slipstream: Slipstream, secrets: set[bytes]) -> str:
    session = Path(cluster.head_node.get_session_dir_path())
    texts = [*session.rglob("*.log"), *session.rglob("*.out"), *session.rglob("*.err")]
    num_bytes = 0
    for path in texts:
        if path.is_file():
            content = path.read_bytes()
            num_bytes += len(content)
            if any(secret in content for secret in secrets):
                raise CheckFailed(f"a key is in {path}")
    shown = repr(actors()).encode() + slipstream.log().encode()
    if len(secrets) != 5 or any(secret in shown for secret in secrets):
        raise CheckFailed(f"{len(secrets)} keys; in what Ray shows of actors or in the log?")
    return f"{len(secrets)} secret keys, none in {len(texts)} files of {num_bytes >> 10} KiB"


def ring_links(cluster: Cluster) -> str:
    """Count the connections of the services by kind."""
    ran = subprocess.run(["ss", "-xH"], capture_output=True, text=True).stdout
    local = len(re.findall(r"slipstream-[0-9a-f]{8}/[0-9a-f]+\.sock", ran))
    nodes = {name: actor["Address"]["NodeID"][:6] for name, actor in actors().items()}
    by_node = {node: sorted(n for n in nodes if nodes[n] == node) for node in set(nodes.values())}
    return f"{local} ipc links; " + "; ".join(", ".join(names) for names in by_node.values())


async def check(options: argparse.Namespace, cluster: Cluster, slipstream: Slipstream) -> None:
    def say(what: str, began_s: float, said: str) -> None:
        print(f"ok      {what:<18}{time.monotonic() - began_s:7.1f} s  {said}", flush=True)

    began_s = time.monotonic()
    url, seconds = await asyncio.to_thread(slipstream.wait_ready)
    say("start", began_s, f"{url}, ready after {seconds:.1f} s")
    began_s = time.monotonic()
    secrets = await asyncio.to_thread(secrets_of, descendants(os.getpid()))
    say("keys", began_s, await asyncio.to_thread(no_key_in_logs, cluster, slipstream, secrets))
    urls = [url, f"http://127.0.0.1:{slipstream.port + 1}"]
    load = Load(urls, options.max_tokens, options.streams)
    running = asyncio.create_task(load.run())
    try:
        for step in ("warm-up", *STEPS, "kill a node", "cool-down"):
            began_s, load.longest_gap_s = time.monotonic(), 0.0
            done = load.done
            if step == "kill a node":
                say("links", began_s, await asyncio.to_thread(ring_links, cluster))
                said = await asyncio.to_thread(kill_node, cluster, slipstream)
            elif "=" in step:
                said = await asyncio.to_thread(slipstream.scale, step)
                await asyncio.to_thread(wait_for_counts, slipstream, step)
            else:
                said = ""
            await asyncio.sleep(STEP_S if "=" in step else 2 * STEP_S)
            say(
                step,
                began_s,
                f"{said}; {load.done - done} streams ended, longest pause "
                f"{load.longest_gap_s:.1f} s, failed: {len(load.errors)}",
            )
    finally:
        load.stopping = True
        await asyncio.wait_for(running, 180)
    began_s = time.monotonic()
    say(
        "keys again", began_s, await asyncio.to_thread(no_key_in_logs, cluster, slipstream, secrets)
    )
    targets = slipstream.targets.read_text()
    began_s = time.monotonic()
    slipstream.process.send_signal(signal.SIGINT)
    status = await asyncio.to_thread(slipstream.process.wait, 120)
    say("end", began_s, f"status {status}; targets were {targets}")
    if load.errors or status:
        raise CheckFailed(f"status {status}, {len(load.errors)} failed: {load.errors[:5]}")
    print(
        f"{load.done} streams of {load.max_tokens} tokens, {load.num_streams} at once; none failed"
    )


def wait_for_counts(slipstream: Slipstream, step: str) -> None:
    """Wait until as many actors live as were asked for, and a router knows their processes."""
    service, _, count = step.partition("=")
    deadline_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline_s:
        names = [name for name in actors() if name.startswith(f"{service}-")]
        if len(names) == slipstream.num_serving(service) == int(count):
            return
        time.sleep(0.2)
    raise CheckFailed(f"{step}: there are {names}, {slipstream.num_serving(service)} serve")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="sim", help="sim, or cpu for the demo model")
    parser.add_argument("--streams", type=int, default=STREAMS, help="at once")
    parser.add_argument("--max-tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--keep", metavar="DIR", help="where to leave the launcher's output")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        cluster = stack.enter_context(cluster_of(NODES))
        print(f"Ray {ray.__version__}, {NODES} nodes at {cluster.address}", flush=True)
        ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
        stack.callback(ray.shutdown)
        more = ("--device", options.device, "--computes", "2")
        times = {"RAY__COMPUTE_CPUS": 1, "COMPUTE__SIM_STEP_BASE_S": STEP_BASE_S}
        slipstream = Slipstream(cluster.address, folder, *more, **times)
        stack.callback(slipstream.process.kill)
        try:
            asyncio.run(check(options, cluster, slipstream))
        except CheckFailed as failure:
            print(f"FAILED  {failure}")
            print(slipstream.log()[-3000:])
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
