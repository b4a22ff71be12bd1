"""Starts a Ray cluster of one node with an autoscaler that may add more, and Slipstream on it with
`--autoscale`; a load that one compute cannot carry must bring nodes, its end take them away again,
and no request may fail.

Needs Ray beside Slipstream: pip install 'slipstream[ray]'. The nodes are raylets of this host, by
the provider that Ray tests its autoscaler with.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from deployment import CheckFailed, free_port
from ray_check import MEMORY, Slipstream, descendants
from streams import Load

HEAD_CPUS, CPUS = 4, 2  # the head has room for one of each service, a node for one compute
MOST_COMPUTES = 3
IDLE_MINUTES = 0.25  # until the autoscaler takes a node away
STREAMS, TOKENS = 40, 64
SETTINGS = {
    "RAY__COMPUTE_CPUS": CPUS,
    "COMPUTE__MAX_NUM_SEQS": 16,
    "COMPUTE__SIM_STEP_BASE_S": 0.02,
    "ROUTER__SCALING_DOWN_AFTER_S": 20,
}
WITHIN_S = 300.0
CONFIG: dict[str, Any] = {
    "cluster_name": "slipstream",
    "max_workers": MOST_COMPUTES,
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": HEAD_CPUS}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": CPUS, "object_store_memory": MEMORY},
            "node_config": {},
            "max_workers": MOST_COMPUTES,
        },
    },
    "head_node_type": "ray.head.default",
    "idle_timeout_minutes": IDLE_MINUTES,
    "upscaling_speed": 1.0,
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}


@contextlib.contextmanager
def autoscaled_cluster() -> Iterator[str]:
    """A head with its autoscaler; its address. Ends what it started, and no other Ray here."""
    address = f"{ray.util.get_node_ip_address()}:{free_port()}"
    provider = {**CONFIG["provider"], "gcs_address": address}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        json.dump({**CONFIG, "provider": provider}, config)  # JSON is YAML
        config.flush()
        command = [
            "ray",
            "start",
            "--head",
            "--block",
            f"--port={address.rpartition(':')[2]}",
            f"--num-cpus={HEAD_CPUS}",
        ]
        command += [f"--object-store-memory={MEMORY}", "--include-dashboard=false"]
        command += [f"--autoscaling-config={config.name}"]
        env = {**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        head_node = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        try:
            ask = ["ray", "status", "--address", address]
            deadline_s = time.monotonic() + WITHIN_S
            while subprocess.run(ask, capture_output=True).returncode:
                if time.monotonic() > deadline_s:
                    raise CheckFailed("Ray did not start")
                time.sleep(0.5)
            yield address
        finally:
            for pid in descendants(head_node.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            head_node.wait(60)


def num_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


async def check(slipstream: Slipstream) -> None:
    began_s = time.monotonic()

    def say(what: str, said: str = "") -> None:
        print(f"ok      {what:<34}{time.monotonic() - began_s:7.1f} s  {said}", flush=True)

    async def until(holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not await asyncio.to_thread(holds):
            if time.monotonic() > deadline_s:
                raise CheckFailed(f"not within {WITHIN_S:.0f} s: {what}")
            await asyncio.sleep(0.2)
        say(what, f"{num_nodes()} nodes, {slipstream.num_serving('compute')} computes")

    url, seconds = await asyncio.to_thread(slipstream.wait_ready)
    say("start", f"{url}, ready after {seconds:.1f} s on {num_nodes()} node")
    load, began_s = Load([url], TOKENS, STREAMS), time.monotonic()
    running = asyncio.create_task(load.run())
    try:
        await until(lambda: num_nodes() > 1, "a node more, from the step on")
        await until(
            lambda: slipstream.num_serving("compute") == MOST_COMPUTES, "all computes serve"
        )
        load.longest_gap_s = 0.0
        await asyncio.sleep(5)
    finally:
        load.stopping = True
        await running
    said = f"{load.done} streams, longest pause at the end {load.longest_gap_s:.1f} s"
    began_s = time.monotonic()
    say("the load ends", f"{said}, failed: {len(load.errors)}")
    await until(lambda: slipstream.num_serving("compute") == 1, "one compute, from the end on")
    await until(lambda: num_nodes() == 1, "one node")
    slipstream.process.send_signal(signal.SIGINT)
    status = await asyncio.to_thread(slipstream.process.wait, 120)
    if load.errors or status:
        raise CheckFailed(f"status {status}, {len(load.errors)} failed: {load.errors[:5]}")
    say("end", "status 0")


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = stack.enter_context(autoscaled_cluster())
        ray.init(address=address, logging_level="error", log_to_driver=False)
        stack.callback(ray.shutdown)
        print(f"Ray {ray.__version__}, one node of {HEAD_CPUS} CPUs at {address}", flush=True)
        scaled = ("--device", "sim", "--autoscale", f"compute=1..{MOST_COMPUTES}")
        slipstream = Slipstream(address, folder, *scaled, **SETTINGS)
        stack.callback(slipstream.process.kill)
        try:
            asyncio.run(check(slipstream))
        except CheckFailed as failure:
            print(f"FAILED  {failure}\n{slipstream.log()[-3000:]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
