"""Builds and starts Slipstream with docker compose, asks it questions by curl, scales it, kills a
worker, stops it, and says what held.

Needs a Docker engine with compose, and curl. Where no image can be pulled or pip needs this
machine's own settings, `--debootstrap` and `--wheelhouse` make what the build needs first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
LOCAL_BASE = "slipstream-base:bookworm"
WORKERS = {"tokenizer": 3, "compute": 2, "detokenizer": 2}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class CheckFailed(Exception):
    """What was expected of the deployment did not hold."""


def run(*command: str, env: dict[str, str] | None = None, timeout_s: float = 60) -> str:
    """The standard output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=ROOT, env=env, timeout=timeout_s, capture_output=True, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise CheckFailed(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
    return done.stdout


def compose_command() -> list[str]:
    """Compose as a plugin of the docker client, or the older program of its own."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise CheckFailed("neither `docker compose` nor `docker-compose` is installed")


@dataclass(frozen=True)
class Container:
    name: str
    service: str
    running: bool
    health: str  # "", starting, healthy or unhealthy
    exit_code: int
    restarts: int


@dataclass(frozen=True)
class Deployment:
    """One compose project and the address of its router."""

    compose: list[str]
    project: str
    port: int
    env: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __call__(self, *arguments: str, timeout_s: float = 120) -> str:
        command = [*self.compose, "--project-name", self.project, *arguments]
        return run(*command, env=self.env, timeout_s=timeout_s)

    def up(self, workers: dict[str, int]) -> None:
        scale = [part for name, n in workers.items() for part in ("--scale", f"{name}={n}")]
        self("up", "--detach", *scale)

    def containers(self) -> list[Container]:
        label = f"label=com.docker.compose.project={self.project}"
        ids = run("docker", "ps", "--all", "--quiet", "--filter", label).split()
        if not ids:
            return []
        found = []
        for raw in json.loads(run("docker", "inspect", *ids)):
            state = raw["State"]
            found.append(
                Container(
                    name=raw["Name"].lstrip("/"),
                    service=raw["Config"]["Labels"]["com.docker.compose.service"],
                    running=state["Running"],
                    health=state.get("Health", {}).get("Status", ""),
                    exit_code=state["ExitCode"],
                    restarts=raw["RestartCount"],
                )
            )
        return sorted(found, key=lambda container: container.name)

    def of(self, service: str) -> list[Container]:
        return [container for container in self.containers() if container.service == service]

    def registered(self) -> dict[str, int]:
        """How many workers of each kind the router knows."""
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                workers = json.load(reply)["workers"]
            return {service: len(workers.get(service, [])) for service in WORKERS}
        return {}

    def curl(self, body: dict[str, Any]) -> list[str]:
        """The command line that sends a chat completion request."""
        url = f"{self.url}/v1/chat/completions"
        head = ["curl", "--silent", "--show-error", "--fail-with-body", "--no-buffer", url]
        return [*head, "--header", "Content-Type: application/json", "--data", json.dumps(body)]


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise CheckFailed(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.5)


def wait_registered(slipstream: Deployment, workers: dict[str, int], timeout_s: float) -> None:
    wait_until(lambda: slipstream.registered() == workers, f"registered: {workers}", timeout_s)


def deltas(stream: str) -> Iterator[str]:
    """The pieces of text in a stream of events; fails unless the stream is complete."""
    events = [line[len("data: ") :] for line in stream.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise CheckFailed(f"the stream did not end with [DONE]: …{stream[-300:]!r}")
    for event in events[:-1]:
        content = json.loads(event)
        if "error" in content:
            raise CheckFailed(f"an error in the stream: {event}")
        for choice in content["choices"]:
            yield choice["delta"].get("content") or ""


# --- the checks, in the order in which they run ----------------------------------------------


def prepare(options: argparse.Namespace, base: str) -> str:
    """The base image and the wheels, where the build can't get them by itself."""
    if options.debootstrap and not run("docker", "images", "--quiet", LOCAL_BASE).strip():
        run("deploy/base_image.sh", LOCAL_BASE, timeout_s=900)
    if options.wheelhouse:
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        version = run("docker", "run", "--rm", base, "python3", "-c", program, timeout_s=600)
        run("deploy/wheelhouse.sh", version.strip(), timeout_s=1800)
    return f"base image {base}"


def build(slipstream: Deployment) -> str:
    slipstream("build", timeout_s=3600)
    return "four images of one build"


def start(slipstream: Deployment) -> str:
    began = time.monotonic()
    slipstream.up(WORKERS)
    kinds = {"router": 1, **WORKERS}

    def all_healthy() -> bool:
        healthy = [c.service for c in slipstream.containers() if c.health == "healthy"]
        return all(healthy.count(kind) == n for kind, n in kinds.items())

    wait_until(all_healthy, "all containers are healthy", 180)
    return f"{sum(kinds.values())} containers healthy after {time.monotonic() - began:.0f} s"


def registration(slipstream: Deployment) -> str:
    wait_registered(slipstream, WORKERS, 30)
    return f"the router knows {WORKERS}"


def ask(slipstream: Deployment) -> str:
    reply = json.loads(run(*slipstream.curl({"messages": QUESTION, "temperature": 0})))
    answer = reply["choices"][0]["message"]["content"]
    if "Paris" not in answer:
        raise CheckFailed(f"the answer was {answer!r}")
    return f"{QUESTION[0]['content']} → {answer.strip()}"


def ask_streaming(slipstream: Deployment) -> str:
    body = {"messages": QUESTION, "temperature": 0, "stream": True}
    pieces = list(deltas(run(*slipstream.curl(body))))
    if "Paris" not in "".join(pieces):
        raise CheckFailed(f"the stream said {''.join(pieces)!r}")
    return f"{len(pieces)} events → {''.join(pieces).strip()}"


def scale(slipstream: Deployment) -> str:
    for workers in ({**WORKERS, "tokenizer": 1}, {**WORKERS, "compute": 3}, WORKERS):
        slipstream.up(workers)
        wait_registered(slipstream, workers, 60)
        ask(slipstream)
    return "tokenizer 3 → 1 → 3 and compute 2 → 3 → 2, a question answered at each step"


def kill_a_worker(slipstream: Deployment) -> str:
    """Kills the process, not the container: the engine must start it again by itself."""
    victim = slipstream.of("compute")[0]
    run("docker", "exec", victim.name, "sh", "-c", "kill -9 -1")
    began = time.monotonic()

    def answered() -> bool:
        with contextlib.suppress(CheckFailed):
            return all("Paris" in ask(slipstream) for _ in range(4))
        return False

    wait_until(answered, "four questions in a row are answered although a worker died", 20)
    seconds = time.monotonic() - began

    def restarted() -> bool:
        now = {container.name: container for container in slipstream.containers()}[victim.name]
        return now.restarts > victim.restarts and now.health == "healthy"

    wait_until(restarted, f"{victim.name} is started again and healthy", 90)
    wait_registered(slipstream, WORKERS, 30)
    ask(slipstream)
    return f"{victim.name} killed; answered again after {seconds:.1f} s; restarted, registered"


def stop(slipstream: Deployment) -> str:
    """Stops everything while streams run: they must end as they would have."""
    story = [{"role": "user", "content": "Tell me a story."}]
    body = {"messages": story, "stream": True, "max_tokens": 300, "ignore_eos": True}
    streams = [open_stream(slipstream.curl(body)) for _ in range(8)]
    firsts = [stream.readline() for stream in streams]
    began = time.monotonic()
    slipstream("stop")
    seconds = time.monotonic() - began
    for first, stream in zip(firsts, streams, strict=True):
        list(deltas(first + stream.read()))
    bad = [f"{c.name}: {c.exit_code}" for c in slipstream.containers() if c.exit_code]
    if bad:
        raise CheckFailed(f"exit codes after the stop: {', '.join(bad)}")
    return f"in {seconds:.1f} s, every exit code 0, {len(streams)} running streams completed"


def open_stream(command: list[str]) -> IO[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--debootstrap", action="store_true", help="make the base image here")
    parser.add_argument("--base-image", help="the base image; default: the Dockerfile's")
    parser.add_argument("--wheelhouse", action="store_true", help="fetch the wheels by host's pip")
    parser.add_argument("--project", default="slipstream-check", help="name of the project")
    parser.add_argument("--port", type=int, default=0, help="port of the router; default: any")
    parser.add_argument("--keep", action="store_true", help="leave containers and volumes")
    options = parser.parse_args()

    base = options.base_image or (LOCAL_BASE if options.debootstrap else "python:3.12-slim")
    port = options.port or free_port()
    env = {**os.environ, "BASE_IMAGE": base, "PORT": str(port), "DOCKER_BUILDKIT": "1"}
    env["COMPOSE_DOCKER_CLI_BUILD"] = "1"  # for the older compose
    steps: list[tuple[str, Callable[[], str]]] = []
    try:
        slipstream = Deployment(compose_command(), options.project, port, env)
        steps = [("prepare", partial(prepare, options, base))]
        checks = (build, start, registration, ask, ask_streaming, scale, kill_a_worker, stop)
        steps += [(check.__name__, partial(check, slipstream)) for check in checks]
        return run_steps(slipstream, steps)
    finally:
        if steps and not options.keep:
            slipstream("down", "--volumes", "--timeout", "5")


def run_steps(slipstream: Deployment, steps: list[tuple[str, Callable[[], str]]]) -> int:
    for name, step in steps:
        began = time.monotonic()
        try:
            said = step()
        except (CheckFailed, subprocess.TimeoutExpired, KeyError, ValueError) as failure:
            print(f"FAILED  {name}: {failure!r}", flush=True)
            with contextlib.suppress(CheckFailed, subprocess.TimeoutExpired):
                print(slipstream("ps", "--all"))
                print(slipstream("logs", "--no-color", "--tail", "40"))
            return 1
        seconds = time.monotonic() - began
        print(f"ok      {name.replace('_', ' '):<16}{seconds:7.1f} s  {said}", flush=True)
    print(f"all {len(steps)} steps passed")
    return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
