"""A stack of a swarm, and a second engine beside this machine's own, in a network of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from deployment import ROOT, CheckFailed, run, wait_until

FILES = ("compose.yaml", "compose.swarm.yaml")
SERVICES = ("tokenizer", "compute", "detokenizer", "router")
NAMESPACE, LINK = "slipstream-swarm", "slip-swarm"
HERE, THERE = "10.99.71.1", "10.99.71.2"  # this engine's address and the second one's, on the link
STARTS_WITHIN_S = 60
ASK = """\
import sys, urllib.request as client
headers = {"Authorization": "Bearer " + sys.argv[1]}
request = client.Request("http://127.0.0.1:8000/health", headers=headers)
print(client.urlopen(request, timeout=5).read().decode())
"""


@dataclass(frozen=True)
class Engine:
    """A Docker engine and the address under which this machine reaches what it publishes."""

    address: str
    host: str = ""  # of its API; empty for the engine that `docker` asks by itself

    def __call__(self, *arguments: str, timeout_s: float = 60) -> str:
        host = ("--host", self.host) if self.host else ()
        return run("docker", *host, *arguments, timeout_s=timeout_s)

    def containers(self, service: str) -> list[str]:
        """The ids of the running containers of a service of a swarm."""
        label = f"label=com.docker.swarm.service.name={service}"
        return self("ps", "--quiet", "--filter", label).split()

    def tasks(self, service: str) -> list[str]:
        """The ids of their tasks."""
        label = ("--filter", f"label=com.docker.swarm.service.name={service}")
        return self("ps", *label, "--format", '{{.Label "com.docker.swarm.task.id"}}').split()


@dataclass(frozen=True)
class Stack:
    """A deployed stack; `engines` has the manager first."""

    name: str
    engines: tuple[Engine, ...]
    env: dict[str, str]
    files: tuple[str, ...] = FILES

    @property
    def manager(self) -> Engine:
        return self.engines[0]

    def tagged(self, tag: str, **env: str) -> Stack:
        """The same stack with the images of another tag, and other variables."""
        return replace(self, env={**self.env, "TAG": tag, **env})

    def deploy(self) -> None:
        files = [part for file in self.files for part in ("--compose-file", file)]
        command = ("stack", "deploy", "--detach=true", "--resolve-image", "never", *files)
        run("docker", *command, self.name, env=self.env, timeout_s=120)

    def scale(self, service: str, count: int) -> None:
        self.manager("service", "scale", "--detach", f"{self.name}_{service}={count}")

    def remove(self) -> None:
        """Take the stack away, and wait until its containers and networks have gone."""
        self.manager("stack", "rm", self.name)
        named = ("--quiet", "--filter", f"name={self.name}_")
        for engine in self.engines:
            gone = partial(_is_empty, engine, "ps", "--all", *named)
            wait_until(gone, "its containers have ended", 120)
        wait_until(partial(_is_empty, self.manager, "network", "ls", *named), "no networks", 60)

    def num_running(self, service: str, engines: Iterable[Engine]) -> int:
        """How many containers of a service run at these engines, and are to."""
        of_service = ("--filter", "desired-state=running", f"{self.name}_{service}")
        tasks = self.manager("service", "ps", "--quiet", "--no-trunc", *of_service).split()
        running = {task for each in engines for task in each.tasks(f"{self.name}_{service}")}
        return len(running) if running <= {*tasks} and len(tasks) == len(running) else -1

    def update_state(self, service: str) -> str:
        """`updating`, `completed`, `rollback_completed` and so on; empty before the first one."""
        inspected = self.manager("service", "inspect", f"{self.name}_{service}")
        status = json.loads(inspected)[0].get("UpdateStatus") or {}
        return str(status.get("State", ""))

    def images(self, service: str) -> set[str]:
        """The tags of the images that a service's containers run."""
        found = set()
        for engine in self.engines:
            for container in engine.containers(f"{self.name}_{service}"):
                image = engine("inspect", "--format", "{{.Config.Image}}", container).strip()
                found.add(image.rpartition(":")[2])
        return found

    def first_of(self, service: str) -> tuple[Engine, str]:
        """A running container of a service and where it runs."""
        for engine in self.engines:
            if found := engine.containers(f"{self.name}_{service}"):
                return engine, found[0]
        raise CheckFailed(f"no container of {service} runs")

    def health(self, api_key: str) -> list[dict[str, Any]]:
        """What each router says of itself and the workers; it is asked inside its container."""
        said = []
        for engine in self.engines:
            for container in engine.containers(f"{self.name}_router"):
                with contextlib.suppress(CheckFailed):  # it is not ready, or ends
                    said.append(json.loads(engine("exec", container, "python", "-c", ASK, api_key)))
        return said


def _is_empty(engine: Engine, *arguments: str) -> bool:
    return not engine(*arguments)


def make_secrets(image: str, prefix: str, api_key: str) -> list[str]:
    """Make the secrets that the stack names; returns their names."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--rm", "--user", str(os.getuid()), "--volume", f"{folder}:/keys")
        run("docker", "run", *options, image, "slipstream", "keys", "/keys")
        api_keys = Path(folder, "api-keys")
        api_keys.write_text(f'[[key]]\nname = "check"\nkey = "{api_key}"\n')
        names = []
        for path in sorted(Path(folder).iterdir()):
            names.append(f"{prefix}-{path.name}")
            run("docker", "secret", "create", names[-1], str(path))
    return names


@contextlib.contextmanager
def swarm(num_engines: int) -> Iterator[tuple[Engine, ...]]:
    """A swarm of this engine, or of it and a second one; both have left it afterwards."""
    with contextlib.ExitStack() as stack:
        here = Engine("127.0.0.1")
        if "inactive" not in here("info", "--format", "{{.Swarm.LocalNodeState}}"):
            raise CheckFailed("this engine is in a swarm already; the check makes one of its own")
        there = stack.enter_context(second_engine()) if num_engines == 2 else None
        here("swarm", "init", "--advertise-addr", HERE if there else "127.0.0.1")
        stack.callback(here, "swarm", "leave", "--force")
        if there:
            token = here("swarm", "join-token", "--quiet", "worker").strip()
            joined = ("swarm", "join", "--token", token, "--advertise-addr", THERE, HERE)
            there(*joined)
            stack.callback(leave, there)
        yield (here, there) if there else (here,)


def leave(engine: Engine) -> None:
    with contextlib.suppress(CheckFailed):
        engine("swarm", "leave", "--force")


@contextlib.contextmanager
def second_engine() -> Iterator[Engine]:
    """A second engine in a network namespace of its own, joined to this one by a veth pair.

    It has no way out, so that a pull that must fail does so at once.
    """
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="slipstream-engine-", ignore_cleanup_errors=True)
        )
        run("ip", "netns", "add", NAMESPACE)
        stack.callback(run, "ip", "netns", "delete", NAMESPACE)
        inside = ("ip", "-n", NAMESPACE)
        peer = ("peer", "name", "eth0", "netns", NAMESPACE)
        run("ip", "link", "add", LINK, "type", "veth", *peer)
        run("ip", "address", "add", f"{HERE}/24", "dev", LINK)
        run(*inside, "address", "add", f"{THERE}/24", "dev", "eth0")
        for up in (("ip", "link", "set", LINK), (*inside, "link", "set", "eth0")):
            run(*up, "up")
        run(*inside, "link", "set", "lo", "up")
        engine = Engine(THERE, f"unix://{home}/api.sock")
        folders = ("--data-root", f"{home}/data", "--exec-root", f"{home}/run")
        places = (*folders, "--pidfile", f"{home}/pid", "--host", engine.host)
        command = ["nsenter", f"--net=/run/netns/{NAMESPACE}", "dockerd", *places]
        log = stack.enter_context(open(f"{home}/log", "w"))
        with subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process:
            try:
                wait_until(lambda: answers(engine), "the second engine runs", STARTS_WITHIN_S)
                yield engine
            finally:
                process.terminate()
                process.wait(60)


def answers(engine: Engine) -> bool:
    with contextlib.suppress(CheckFailed):
        return bool(engine("info", "--format", "{{.ID}}"))
    return False


def copy_images(engines: tuple[Engine, ...], images: list[str]) -> None:
    """Give images to the engines but the first, as there is no registry."""
    for engine in engines[1:]:
        saved = subprocess.Popen(["docker", "save", *images], stdout=subprocess.PIPE, cwd=ROOT)
        load = ["docker", "--host", engine.host, "load", "--quiet"]
        loaded = subprocess.run(load, stdin=saved.stdout, capture_output=True, text=True)
        if saved.wait() or loaded.returncode:
            raise CheckFailed(f"the images were not copied: {loaded.stderr}")
