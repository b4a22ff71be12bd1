"""One launch of the whole server on a Ray cluster, from the plan to the exit status."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from common.config import DEMO_MODEL, ModelSettings, resolved_model
from common.errors import EXIT_CONFIG, EXIT_FATAL, EXIT_SIGNALLED, ConfigError
from common.run_dir import private_run_dir
from services.launcher.autoscale import Autoscaler
from services.launcher.front import desired_replicas
from services.launcher.launch import banner, has_api_keys, opened_console, scalable
from services.launcher.on_ray.places import Needs, needs_of
from services.launcher.plan import Plan, scaled_router
from services.launcher.supervisor import SAY_WAITING_S

if TYPE_CHECKING:
    from services.launcher.on_ray.replicas import RayReplicas, Replica
    from services.launcher.on_ray.service_process import Report

LOOK_S = 0.2
CONNECT_S = 5.0


def launch_on_ray(plan: Plan, env: Mapping[str, str]) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--on ray: Ray is not installed here; pip install 'slipstream[ray]'")
    if plan.autoscale:  # now, since all routers are to have the same token
        plan = replace(plan, tables={**plan.tables, "router": scaled_router(plan)})
    check_address(plan.ray.address or env.get("RAY_ADDRESS") or last_address(env))
    import ray

    with opened_console(plan) as console:
        telemetry = plan.telemetry.model_copy(update={"log_format": console.log_format})
        plan = replace(plan, model=model_for_nodes(plan.model), telemetry=telemetry)
        launch_id = secrets.token_hex(4)
        namespace = f"slipstream-{launch_id}"
        address = plan.ray.address or None
        try:
            ray.init(address=address, namespace=namespace, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--on ray: no Ray cluster{f' at {address}' if address else ''}: {error}"
            ) from error
        try:
            needs = needs_of(plan, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)

            def announce(url: str, seconds: float) -> None:
                console.terminal.clear()
                name = plan.model.served_name[0]
                console.out.write(banner(url, name, seconds, has_api_keys(plan)))

            status, complaint = asyncio.run(RayLaunch(plan, announce).run(needs, launch_id))
        finally:
            ray.shutdown()
        if complaint:
            console.err.write(f"slipstream serve: {complaint}\n")
        return status


def last_address(env: Mapping[str, str]) -> str:
    """Return where Ray would look for a cluster of this host: where the last one was."""
    noted = Path(env.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    return noted.read_text().strip() if noted.exists() else ""


def check_address(address: str) -> None:
    """Raise ConfigError if nothing answers where a cluster should be: Ray would ask for ever."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():  # Ray knows other names, such as `auto`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--on ray: nothing answers at {address} ({error}); `ray status` on a node of the "
            "cluster says whether it runs, `ray start --head` starts one, and --address local one "
            "that ends with this command"
        ) from error


def model_for_nodes(model: ModelSettings) -> ModelSettings:
    """Name the model as here, and its folder so that it is the same one on every node."""
    path = Path(model.path).expanduser()
    if model.path != DEMO_MODEL and path.exists():
        model = model.model_copy(update={"path": str(path.absolute())})
    return model.model_copy(update={"served_name": resolved_model(model).served_name})


class RayLaunch:
    """What one launch does, from asking for the replicas to the end of the last one."""

    def __init__(self, plan: Plan, announce: Callable[[str, float], None]) -> None:
        """`announce` is called with the API's address and the seconds that the start took."""
        self._plan = plan
        self._announce = announce
        self._log = structlog.get_logger()
        self._was_ready = False
        self._ending = asyncio.Event()
        self._urgent = asyncio.Event()
        self._status = 0
        self._complaint = ""

    async def run(self, needs: Needs, launch_id: str) -> tuple[int, str]:
        """Return the exit status, and why a replica cannot work if that ended the launch."""
        from services.launcher.on_ray.replicas import RayReplicas

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        replicas = RayReplicas(self._plan, needs, launch_id, self._failed)

        async def desired() -> Mapping[str, int]:
            if not (self._was_ready and replicas.urls):
                raise ValueError("no router runs")
            token = self._plan.value("router", "metrics_token")
            return await desired_replicas(replicas.urls[0], token)

        with private_run_dir() as run_dir:
            async with scalable(Autoscaler(replicas, self._plan.autoscale, desired), run_dir):
                replicas.start()
                await self._watch(replicas)
        if not self._was_ready:
            self._urgent.set()  # what is still loading has nothing to finish
        await replicas.drain(self._urgent)
        return self._status, self._complaint

    async def _watch(self, replicas: RayReplicas) -> None:
        began_s = time.monotonic()
        say_s = began_s + SAY_WAITING_S
        while not self._ending.is_set():
            now_s = time.monotonic()
            if not self._was_ready and replicas.all_ready:
                self._was_ready = True
                first, *others = replicas.urls
                self._announce(first, now_s - began_s)
                if others:
                    self._log.info("more routers", urls=others)
            waiting = replicas.waiting()
            if not waiting:
                say_s = now_s + SAY_WAITING_S
            elif now_s >= say_s:
                say_s = now_s + SAY_WAITING_S
                self._log.info("still starting", waiting_for=", ".join(waiting))
            replicas.publish()
            await asyncio.sleep(LOOK_S)

    def _failed(self, replica: Replica, report: Report) -> None:
        complaint = f"{replica.name} on {report.host} cannot work: {report.complaint}"
        if self._was_ready:
            self._log.error(complaint)
            return
        self._status = EXIT_CONFIG if report.failed == EXIT_CONFIG else EXIT_FATAL
        self._complaint = complaint
        self._ending.set()

    def _signalled(self, number: signal.Signals) -> None:
        if self._ending.is_set():
            self._urgent.set()
            self._status = EXIT_SIGNALLED + int(number)
            return
        self._log.info("draining; a second signal ends it at once", signal=number.name)
        self._ending.set()
