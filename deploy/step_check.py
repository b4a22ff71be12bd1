"""How long does it take from a step in load until it is served, by engine?

    python3 deploy/step_check.py host|ray|compose|swarm|kubernetes

One of each service, on a virtual device with 16 places, and from one moment to the next 40 streams.
On one host and on Ray the launch scales compute itself (`--autoscale`). For the others this asks a
router at /scaling what it wants, as an autoscaler would, and then gives the engine's own command;
for Kubernetes, that is to start two more pods of the rendered manifests on a Docker engine.

Needs what the check of the same engine needs, images of this source among it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deployment import Deployment, compose_command, environment, free_port, run
from streams import Load

from benchmarks.stack import ROOT as SOURCE
from benchmarks.stack import Stack as Server

STREAMS, TOKENS, MOST = 40, 64, 3
SETTINGS = {
    "COMPUTE__DEVICE": "sim",
    "COMPUTE__MAX_NUM_SEQS": 16,
    "COMPUTE__SIM_STEP_BASE_S": 0.02,
}
KEY, TOKEN = "step-check-key", "step-check-token"
POLL_S = 0.2
WITHIN_S = 300.0
AUTOSCALE = ("--autoscale", f"compute=1..{MOST}")


@dataclass(frozen=True, slots=True)
class Engine:
    """What runs, where it is asked, and how it is told to have more computes."""

    url: str
    scale: Callable[[], object] = lambda: None  # it does that by itself
    api_key: str = ""
    metrics_token: str = ""

    def get(self, path: str, token: str) -> dict[str, Any]:
        """What a router answers; nothing while it does not."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.url + path, headers=headers)
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(request, timeout=5) as answer:
                return dict(json.load(answer))
        return {}

    def desired(self) -> int:
        report = self.get("/scaling", self.metrics_token)
        return int(report.get("desired_replicas", {}).get("compute", 0))

    def computes(self) -> list[dict[str, Any]]:
        """The computes that a router knows."""
        instances = self.get("/health", self.api_key).get("instances", [])
        return [each for each in instances if each["service"] == "compute"]


# --- the engines --------------------------------------------------------------------------------


@contextlib.contextmanager
def host() -> Iterator[Engine]:
    settings = {name.lower().replace("__", "."): value for name, value in SETTINGS.items()}
    with Server(SOURCE / "models" / "demo", *AUTOSCALE, settings=settings) as server:
        yield Engine(server.url)


@contextlib.contextmanager
def on_ray() -> Iterator[Engine]:
    from ray_check import CPUS, NODES, Slipstream, cluster_of

    with cluster_of(NODES) as cluster, tempfile.TemporaryDirectory() as folder:
        print(f"{NODES} nodes of {CPUS} processors")
        slipstream = Slipstream(cluster.address, Path(folder), *AUTOSCALE, **SETTINGS)
        try:
            yield Engine(slipstream.wait_ready()[0])
        finally:
            slipstream.process.terminate()
            slipstream.process.wait(120)


@contextlib.contextmanager
def on_compose() -> Iterator[Engine]:
    slipstream = Deployment(
        compose_command(), "slipstream-step", free_port(), environment("", 0), ("compose.yaml",)
    )
    slipstream = replace(slipstream, env={**slipstream.env, "PORT": str(slipstream.port)})
    with override() as path:
        slipstream = replace(slipstream, files=(*slipstream.files, path))
        slipstream.up({}, "--wait", timeout_s=300)
        try:
            yield Engine(slipstream.url, lambda: slipstream.up({"compute": MOST}))
        finally:
            slipstream("down", "--volumes", "--timeout", "5")


@contextlib.contextmanager
def on_swarm() -> Iterator[Engine]:
    from swarm import FILES, Stack, make_secrets, swarm

    port, secrets = free_port(), "slipstream-step"
    replicas = {f"{name}S": "1" for name in ("ROUTER", "TOKENIZER", "COMPUTE", "DETOKENIZER")}
    env = {**os.environ, "PORT": str(port), "SECRETS": secrets, **replicas}
    with swarm(1) as engines, override(ROUTER__METRICS_TOKEN=TOKEN) as path:
        names = make_secrets("slipstream-router", secrets, KEY)
        stack = Stack("slipstream-step", engines, env, (*FILES, path))
        try:
            stack.deploy()
            yield Engine(
                f"http://127.0.0.1:{port}", lambda: stack.scale("compute", MOST), KEY, TOKEN
            )
        finally:
            stack.remove()
            run("docker", "secret", "rm", *names)


@contextlib.contextmanager
def on_kubernetes() -> Iterator[Engine]:
    from kubernetes_check import made_secrets
    from manifests import BASE, kustomized
    from pods import Node
    from stack import KEY as API_KEY
    from stack import Stack

    manifests = kustomized(BASE)
    for each in manifests:
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "slipstream-compute":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            names = {f"SLIPSTREAM_{name}": str(value) for name, value in SETTINGS.items()}
            kept = [entry for entry in container["env"] if entry["name"] not in names]
            container["env"] = kept + [{"name": n, "value": v} for n, v in names.items()]
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        node = Node("slipstream-step", "0.1.0", Path(folder))
        node.folder.chmod(0o755)
        run("docker", "network", "create", node.network)
        stack = Stack(manifests, node, 1)
        try:
            node.secrets = made_secrets(node)
            for component in ("router", "tokenizer", "compute", "detokenizer"):
                stack.add(component)
            stack.wait_ready()
            url = f"http://{stack.of('router')[0].address}:8000"
            more = lambda: [stack.add("compute") for _ in range(MOST - 1)]  # noqa: E731
            yield Engine(url, more, API_KEY, "scraper")
        finally:
            for pod in stack.made:
                pod.remove()
            run("docker", "network", "rm", node.network)


@contextlib.contextmanager
def override(**of_router: object) -> Iterator[str]:
    """A compose file that gives compute the virtual device, and the router these settings."""
    services = {"compute": SETTINGS, "router": of_router}
    variables = {
        service: {f"SLIPSTREAM_{name}": str(value) for name, value in settings.items()}
        for service, settings in services.items()
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        # JSON is YAML
        json.dump({"services": {s: {"environment": env} for s, env in variables.items()}}, file)
        file.flush()
        yield file.name


# --- the measurement ----------------------------------------------------------------------------


async def measure(engine: Engine) -> str:
    """Begin all streams at once, and note when more computes were wanted, there, and enough."""
    await until(lambda: len(engine.computes()) == 1)
    load = Load([engine.url], TOKENS, STREAMS, engine.api_key)
    running, began_s = asyncio.create_task(load.run()), time.monotonic()
    try:
        await until(lambda: engine.desired() >= MOST)
        wanted_s = time.monotonic() - began_s
        await asyncio.to_thread(engine.scale)
        await until(lambda: len(engine.computes()) == MOST)
        there_s = time.monotonic() - began_s
        await until(lambda: not any(each["num_waiting"] for each in engine.computes()))
        served_s = time.monotonic() - began_s
    finally:
        load.stopping = True
        await running
    return (
        f"{MOST} computes wanted after {wanted_s:.1f} s, registered after {there_s:.1f}, nothing "
        f"waits after {served_s:.1f}; {load.done} streams ended, failed: {len(load.errors)}"
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


ENGINES = {
    "host": host,
    "ray": on_ray,
    "compose": on_compose,
    "swarm": on_swarm,
    "kubernetes": on_kubernetes,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    name = parser.parse_args().engine
    with ENGINES[name]() as engine:
        print(f"{name}: {asyncio.run(measure(engine))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
