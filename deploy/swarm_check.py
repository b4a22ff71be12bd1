"""Deploys Slipstream as a stack of a swarm, with two of each service, and while clients of nine
kinds ask without a pause scales, updates, rolls back, kills, and empties and loses a node. No
request may fail.

Needs the images that compose.yaml and compose.proxy.yaml build, an engine that is in no swarm, and
to start a second one: root, and a kernel with VXLAN. `--one-engine` does without that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from deployment import CheckFailed, free_port, leftovers, run, run_steps, wait_until
from load import KINDS, Lanes
from swarm import FILES, LINK, SERVICES, Stack, copy_images, make_secrets, swarm

WORKERS = ("tokenizer", "compute", "detokenizer")
REPLICAS = 2
ALL = dict.fromkeys(SERVICES, REPLICAS)
STEP_S = 0.01  # 200 tokens take 2 s: there are streams in the middle at any time
HOLD_S, GRACE_S = 60.0, 120.0  # the machine may be busy
READY_WITHIN_S = 300.0  # the machine may be busy
UPDATED_WITHIN_S = 600.0
FIRST, NEXT, BROKEN = "check", "check-next", "check-broken"  # tags
SECRETS, API_KEY = "slipstream-check", "swarm-check-key"
IMAGE_OF = {
    NEXT: "FROM slipstream-{service}:check\nLABEL version=next\n",
    BROKEN: 'FROM slipstream-{service}:check\nCMD ["false"]\n',
}


@dataclass
class SwarmCheck:
    """A stack, and clients that ask it all the time."""

    stack: Stack
    port: int
    lanes: Lanes | None = None

    def steps(self, only: list[str] | None) -> Iterator[tuple[str, Callable[[], str]]]:
        """The checks, all or those that are named, in the order in which they run."""
        checks = [self.begin, self.scale, self.update, self.roll_back, self.kill]
        if len(self.stack.engines) > 1:
            checks += [self.empty_a_node, self.lose_a_node]
        for check in (*checks, self.end):
            if only is None or check.__name__ in only:
                yield check.__name__, check

    # --- the checks -------------------------------------------------------------------------

    def begin(self) -> str:
        """Copy the images, make the secrets, deploy; clients ask at each engine's port."""
        images = [f"slipstream-{name}:{tag}" for name in SERVICES for tag in (FIRST, NEXT, BROKEN)]
        copy_images(self.stack.engines, [*images, f"slipstream-proxy:{FIRST}"])
        names = make_secrets(f"slipstream-router:{FIRST}", SECRETS, API_KEY)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as override:
            # JSON is YAML
            json.dump({"services": {service: changes(service) for service in SERVICES}}, override)
        self.stack = replace(self.stack, files=(*FILES, override.name))
        self.stack.deploy()
        self._require(ALL)
        self._ask_at([engine.address for engine in self.stack.engines])
        return (
            f"{len(names)} secrets, {REPLICAS} of each service on {len(self.stack.engines)} engines"
        )

    def scale(self) -> str:
        said = []
        for service in SERVICES:
            for count in (1, 3, REPLICAS):
                began_s = time.monotonic()
                self.stack.scale(service, count)
                self._require({**ALL, service: count})
                if count == 3:
                    said.append(f"{service} {time.monotonic() - began_s:.0f} s")
                self._go_on()
        return f"each 2 → 1 → 3 → 2; from 1 to 3 known to all routers after {', '.join(said)}"

    def update(self) -> str:
        """Deploy the stack with other images; the swarm replaces all services at a time."""
        self.stack = self.stack.tagged(NEXT)
        self.stack.deploy()
        for service in SERVICES:
            self._wait_updated(service, "completed")
            if (tags := self.stack.images(service)) != {NEXT}:
                raise CheckFailed(f"{service} runs images {tags}")
        self._require(ALL)
        self._go_on()
        return "stack deploy with another tag, all services at once"

    def roll_back(self) -> str:
        """Update one service to an image that does not start."""
        name, image = f"{self.stack.name}_compute", f"slipstream-compute:{BROKEN}"
        options = ("--detach", "--no-resolve-image", "--image", image)
        self.stack.manager("service", "update", *options, name)
        self._wait_updated("compute", "rollback_completed")
        self._require(ALL)
        if (tags := self.stack.images("compute")) != {NEXT}:
            raise CheckFailed(f"compute runs images {tags}")
        self._go_on()
        return "an image of compute that does not start: the swarm took it back"

    def kill(self) -> str:
        said = []
        for service in SERVICES:
            engine, container = self.stack.first_of(service)
            began_s = time.monotonic()
            with self._cuts(service == "router"):
                engine("kill", container)
            self._require(ALL)
            said.append(f"{service} {time.monotonic() - began_s:.0f} s")
            self._go_on()
        return f"replaced and known after: {', '.join(said)}; {self._num_cut} answers cut"

    def empty_a_node(self) -> str:
        """Let a node have no tasks, as before it is restarted; then let it have some again."""
        self._ask_at([self.stack.manager.address])
        node = self._second_node()
        for availability in ("drain", "active"):
            self.stack.manager("node", "update", "--availability", availability, node)
            self._require(ALL)
            self._go_on()
        for service in SERVICES:  # the swarm moves nothing back by itself
            # Started first, both could come to the empty node.
            options = ("--detach", "--force", "--update-order", "stop-first")
            self.stack.manager("service", "update", *options, f"{self.stack.name}_{service}")
            self._wait_updated(service, "completed")
        self._require(ALL)
        for service in SERVICES:
            name = f"{self.stack.name}_{service}"
            numbers = [len(engine.tasks(name)) for engine in self.stack.engines]
            if max(numbers) > 1:
                raise CheckFailed(f"{service} is not spread: {numbers}")
        self._go_on()
        return "drained, activated, and services spread again, each one stopped first"

    def lose_a_node(self) -> str:
        """Cut the second engine off: what ran there is started on the first one."""
        began_s = time.monotonic()
        with self._cuts(True):
            run("ip", "link", "set", LINK, "down")
        self._require(ALL, num_engines=1)
        seconds = time.monotonic() - began_s
        self._go_on()
        run("ip", "link", "set", LINK, "up")
        wait_until(self._second_node_is_ready, "the second node is back", READY_WITHIN_S)
        self._require(ALL)
        self._go_on()
        return (
            f"all on the other one after {seconds:.0f} s; {self._num_cut} answers cut; it came back"
        )

    def end(self) -> str:
        assert self.lanes is not None
        num_answers, lanes, self.lanes = self.lanes.close(), self.lanes, None
        lanes.require_none()
        wait_until(lambda: not leftovers(self.stack.health(API_KEY)), "all tables are empty", 30)
        self.stack.remove()
        return f"{num_answers} answers as the first ones; all tables empty"

    # --- what they are made of --------------------------------------------------------------

    def state(self) -> str:
        """What to look at after a failure."""
        said = self.stack.manager("stack", "ps", "--no-trunc", self.stack.name)
        for service in SERVICES:
            command = ["docker", "service", "logs", "--tail", "20", f"{self.stack.name}_{service}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            said += done.stdout + done.stderr
        return said

    def close(self) -> None:
        """End the clients, whatever they still get."""
        if self.lanes is not None:
            self.lanes.stop()

    def _ask_at(self, addresses: list[str]) -> None:
        """Begin to ask at these addresses, after the answers of those asked before."""
        if self.lanes is not None:
            self.lanes.close()
            self.lanes.require_none()
        places = [f"{address}:{self.port}" for address in addresses]
        num_before = sum(self.lanes.num_answers) if self.lanes is not None else 0
        self.lanes = Lanes(places, "demo", len(places) * len(KINDS), API_KEY)
        self.lanes.num_answers[0] += num_before
        self._go_on()

    def _go_on(self) -> None:
        """Wait until every client has an answer to a new request; none may have failed."""
        assert self.lanes is not None
        self.lanes.go_on()

    @contextlib.contextmanager
    def _cuts(self, routers: bool) -> Iterator[None]:
        """What runs while this happens to a router may lose its connection, and nothing else."""
        assert self.lanes is not None
        if routers:
            self.lanes.may_be_cut_until_s = float("inf")
        yield
        if routers:
            self.lanes.may_be_cut_until_s = time.monotonic()

    @property
    def _num_cut(self) -> int:
        """Answers that ended with their router, and have not been told of."""
        assert self.lanes is not None
        num_cut, self.lanes.num_cut = self.lanes.num_cut, 0
        return num_cut

    def _require(self, counts: dict[str, int], num_engines: int | None = None) -> None:
        """Wait until so many of each run and every router knows every worker."""
        workers = {service: counts[service] for service in WORKERS}
        engines = self.stack.engines[:num_engines]

        def holds() -> bool:
            # The swarm goes on to count what ran on a node that is down, so containers are counted.
            running = {service: self.stack.num_running(service, engines) for service in counts}
            if running != counts:
                return False
            health = replace(self.stack, engines=engines).health(API_KEY)
            return [each.get("workers") for each in health] == [workers] * counts["router"]

        wait_until(holds, f"running and registered: {counts}", READY_WITHIN_S)

    def _wait_updated(self, service: str, state: str) -> None:
        holds = lambda: self.stack.update_state(service) == state  # noqa: E731
        wait_until(holds, f"the update of {service} is {state}", UPDATED_WITHIN_S)

    def _second_node(self) -> str:
        return self.stack.engines[1]("info", "--format", "{{.Swarm.NodeID}}").strip()

    def _second_node_is_ready(self) -> bool:
        state = ("node", "inspect", "--format", "{{.Status.State}}", self._second_node())
        return self.stack.manager(*state).strip() == "ready"


def changes(service: str) -> dict[str, object]:
    """What differs from a user's stack: times that suit a busy machine."""
    environment = {f"SLIPSTREAM_{service.upper()}__GRACE_S": str(GRACE_S)}
    if service == "compute":
        environment["SLIPSTREAM_COMPUTE__SIM_STEP_BASE_S"] = str(STEP_S)
    if service == "router":
        environment["SLIPSTREAM_ROUTER__HOLD_S"] = str(HOLD_S)
    return {"environment": environment, "stop_grace_period": f"{GRACE_S + 30:.0f}s"}


def build(options: argparse.Namespace) -> str:
    """Tag the images that are there, and make those of two other releases of them."""
    for service in (*SERVICES, "proxy"):
        run("docker", "tag", f"slipstream-{service}:{options.tag}", f"slipstream-{service}:{FIRST}")
        for tag, text in IMAGE_OF.items():
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "Dockerfile").write_text(text.format(service=service))
                run(
                    "docker", "build", "--tag", f"slipstream-{service}:{tag}", folder, timeout_s=300
                )
    return f"{FIRST}, {NEXT} and {BROKEN}, of {options.tag}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tag", default="latest", help="of the images to check")
    parser.add_argument("--one-engine", action="store_true", help="start no second engine")
    parser.add_argument("--only", help="names of steps, with commas; begin and end belong to all")
    parser.add_argument("--stack", default="slipstream-check", help="name of the stack")
    parser.add_argument("--port", type=int, default=0, help="of the proxy; default: any")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended, too
    port = options.port or free_port()
    env = {**os.environ, "PORT": str(port), "DEVICE": "sim", "SECRETS": SECRETS}
    env |= {"TAG": FIRST, "PROXY_TAG": FIRST}
    steps: list[tuple[str, Callable[[], str]]] = [("build", partial(build, options))]
    with swarm(1 if options.one_engine else 2) as engines:
        check = SwarmCheck(Stack(options.stack, engines, env), port)
        steps += check.steps(options.only.split(",") if options.only else None)
        try:
            return run_steps(steps, check.state)
        finally:
            check.close()
            with contextlib.suppress(CheckFailed):
                check.stack.remove()


if __name__ == "__main__":
    sys.exit(main())
