"""One compose project: its containers, its router's answers, and what is run in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class CheckFailed(Exception):
    """What was expected of the deployment did not hold."""


def run(*command: str, env: dict[str, str] | None = None, timeout_s: float = 60) -> str:
    """The standard output of a command that must succeed."""
    line = " ".join(command).splitlines()[0]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, timeout=timeout_s, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        raise CheckFailed(f"{line} did not end within {timeout_s:.0f} s") from None
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise CheckFailed(f"{line} ended with {done.returncode}:\n{tail}")
    return done.stdout


def compose_command() -> list[str]:
    """Compose as a plugin of the docker client, or the older program of its own."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise CheckFailed("neither `docker compose` nor `docker-compose` is installed")


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Return as soon as it holds; CheckFailed after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise CheckFailed(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.1)


def run_steps(steps: list[tuple[str, Callable[[], str]]], state: Callable[[], str]) -> int:
    """Run one after the other and print what each says; the exit status. A failure ends it."""
    for name, step in steps:
        began_s = time.monotonic()
        try:
            said = step()
        except (CheckFailed, subprocess.TimeoutExpired, KeyError, ValueError) as failure:
            print(f"FAILED  {name}: {failure!r}", flush=True)
            with contextlib.suppress(CheckFailed, subprocess.TimeoutExpired):
                print(state())
            return 1
        seconds = time.monotonic() - began_s
        print(f"ok      {name.replace('_', ' '):<16}{seconds:7.1f} s  {said}", flush=True)
    print(f"all {len(steps)} steps passed")
    return 0


@dataclass(frozen=True)
class Container:
    """What the engine says of one container; `health` is empty, starting, healthy or unhealthy."""

    name: str
    service: str
    health: str
    exit_code: int
    restarts: int
    addresses: dict[str, str]  # by network; none while it does not run


@dataclass(frozen=True)
class Deployment:
    """One compose project and the address of its router."""

    compose: list[str]
    project: str
    port: int
    env: dict[str, str]
    files: tuple[str, ...] = ("compose.yaml",)

    @property
    def url(self) -> str:
        """Where the API is."""
        return f"http://127.0.0.1:{self.port}"

    def command(self, *arguments: str) -> list[str]:
        """The command line of a compose command on this project."""
        files = [part for file in self.files for part in ("--file", file)]
        return [*self.compose, "--project-name", self.project, *files, *arguments]

    def __call__(self, *arguments: str, timeout_s: float = 120) -> str:
        return run(*self.command(*arguments), env=self.env, timeout_s=timeout_s)

    def up(self, workers: dict[str, int], *options: str, timeout_s: float = 120) -> None:
        """Start what is missing, stop what is too many, recreate what has other settings."""
        scale = [part for name, n in workers.items() for part in ("--scale", f"{name}={n}")]
        self("up", "--detach", *options, *scale, timeout_s=timeout_s)

    def containers(self) -> list[Container]:
        """All containers of the project, ordered by name."""
        label = f"label=com.docker.compose.project={self.project}"
        ids = run("docker", "ps", "--all", "--quiet", "--filter", label).split()
        if not ids:
            return []
        found = [_container(raw) for raw in json.loads(run("docker", "inspect", *ids))]
        return sorted(found, key=lambda container: container.name)

    def first_of(self, service: str) -> Container:
        """The first container of a service."""
        return next(each for each in self.containers() if each.service == service)

    def routers(self) -> list[str]:
        """Where this host reaches the API of each router that runs."""
        front = f"{self.project}_front"
        running = [each for each in self.containers() if each.service == "router"]
        return [f"http://{each.addresses[front]}:8000" for each in running if each.addresses]

    def health(self, url: str = "") -> dict[str, Any]:
        """What a router says of itself and its workers; empty while it does not answer."""
        request = urllib.request.Request(f"{url or self.url}/health")
        if keys := self.env.get("API_KEYS"):  # without one it says nothing of the workers
            request.add_header("Authorization", f"Bearer {keys.partition(',')[0]}")
        try:
            with urllib.request.urlopen(request, timeout=5) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as reply:  # 503 until it is ready, with the same body
            with contextlib.suppress(OSError, ValueError):
                return dict(json.load(reply))
        except (OSError, ValueError):
            pass
        return {}

    def curl(self, body: dict[str, Any], api_key: str = "") -> list[str]:
        """The command line that sends a chat completion request to the demo model."""
        command = ["curl", "--silent", "--show-error", "--fail-with-body", "--no-buffer"]
        command += [f"{self.url}/v1/chat/completions", "--header", "Content-Type: application/json"]
        if api_key:
            command += ["--header", f"Authorization: Bearer {api_key}"]
        return [*command, "--data", json.dumps({"model": "demo", **body})]

    def program(self, name: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
        """The command line that runs a file of deploy/ in a new container with our packages."""
        text = (ROOT / "deploy" / name).read_text()
        docker = ["docker", "run", "--rm", "--interactive", *options, "slipstream-router"]
        return [*docker, "python", "-c", text, *arguments]


def _container(raw: dict[str, Any]) -> Container:
    state = raw["State"]
    return Container(
        name=raw["Name"].lstrip("/"),
        service=raw["Config"]["Labels"]["com.docker.compose.service"],
        health=state.get("Health", {}).get("Status", ""),
        exit_code=state["ExitCode"],
        restarts=raw["RestartCount"],
        addresses={
            name: network["IPAddress"]
            for name, network in raw["NetworkSettings"]["Networks"].items()
            if network["IPAddress"]
        },
    )


def leftovers(healths: Iterable[dict[str, Any]]) -> list[str]:
    """What the tables of all services still hold, as the routers' `/health` says."""
    found = []
    for health in healths:
        keys = ("requests", "attempts", "queries")
        found += [f"{key} {health[key]}" for key in keys if health[key]]
        for each in health["instances"]:
            held = {k: each[k] for k in ("open", "num_running", "num_waiting", "kv_usage")}
            found += [f"{each['service']} {held}"] if any(held.values()) else []
    return found


def free_port() -> int:
    """A port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(base: str, port: int) -> dict[str, str]:
    """The variables of compose.yaml; up to three computes share the cores."""
    threads = max(1, ((os.cpu_count() or 1) - 1) // 3)
    ours = {"BASE_IMAGE": base, "PORT": str(port), "THREADS": str(threads), "API_KEYS": ""}
    builder = {"DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}  # for the older compose
    return {**os.environ, **ours, **builder}
