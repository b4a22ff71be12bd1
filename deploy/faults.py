"""What the check does to the containers while clients ask, and what must hold then.

No request fails. Compute is `sim`, whose text depends on a request alone, so that every answer can
be compared with the one given before.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from deployment import ROOT, Container, Deployment, leftovers, run, wait_until
from load import KINDS, Lanes

WORKERS = ("tokenizer", "compute", "detokenizer")
SERVICES = (*WORKERS, "router")
REPLICAS = 2
ALL = dict.fromkeys(SERVICES, REPLICAS)
STEP_S = 0.01  # 200 tokens take 2 s: there are streams in the middle at any time
READY_WITHIN_S = 300.0  # the machine may be busy
HOLD_S = 60.0  # for the time that a busy machine takes to start both workers of a kind
FROZEN_S = 15.0
BEFORE = "before"  # tag of the images of the release before
OLD_IMAGE = """\
FROM slipstream-{service}
COPY old_release.py /opt/slipstream/tests/old_release.py
CMD ["python", "-m", "tests.old_release", "{service}"]
"""


@dataclass
class UnderLoad:
    """A deployment with a proxy and two of each service, and clients that ask it all the time."""

    slipstream: Deployment
    lanes: Lanes | None = None

    def steps(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """The checks, in the order in which they run."""
        checks = (self.begin, self.upgrade, self.scale, self.restart, self.kill, self.hang)
        for check in (*checks, self.freeze, self.cut_off, self.end):
            yield f"load: {check.__name__}", check

    # --- the checks -------------------------------------------------------------------------

    def begin(self) -> str:
        """Start the release before, two of each service, and the clients."""
        for service in SERVICES:
            build_old_image(service)
        self._up(BEFORE)
        self.lanes = Lanes([f"127.0.0.1:{self.slipstream.port}"], "demo", 2 * len(KINDS))
        self._go_on()
        return f"{2 * len(KINDS)} clients ask {REPLICAS} of each service of the release before"

    def upgrade(self) -> str:
        """Replace the images of one service after the other."""
        said = []
        current = self._configured("latest")
        for service in SERVICES:
            began_s = time.monotonic()
            env = {**current.env, "COMPOSE": " ".join(current.command())}
            run("deploy/roll.sh", service, env=env, timeout_s=4 * READY_WITHIN_S)
            self._go_on()
            said.append(f"{service} {time.monotonic() - began_s:.0f} s")
        self._require_all()
        return f"to this release, without a failed request: {', '.join(said)}"

    def scale(self) -> str:
        for service in SERVICES:
            for count in (1, 3, REPLICAS):
                self.slipstream.up({**ALL, service: count}, "--no-recreate", timeout_s=300)
                self._require({**ALL, service: count})
                self._go_on()
        return f"each of {', '.join(SERVICES)} {REPLICAS} → 1 → 3 → {REPLICAS}"

    def restart(self) -> str:
        """All workers of a kind at once: requests are held until they are back."""
        for service in WORKERS:
            self.slipstream("restart", service)
            self._require(ALL)
            self._go_on()
        return "both workers of each kind at once"

    def kill(self) -> str:
        """`docker kill`: the engine takes that for a wish, and does not start them again."""
        for service in SERVICES:
            with self._cuts(service):
                run("docker", "kill", self.slipstream.first_of(service).name)
            self._go_on()
            self._require_all()
        return f"one of each; with the router {self._num_cut} answers ended"

    def hang(self) -> str:
        """Stop all processes of a container: its health check must kill them."""
        said = []
        for service in SERVICES:
            victim = self.slipstream.first_of(service)
            began_s = time.monotonic()
            with self._cuts(service):
                run("docker", "exec", victim.name, "sh", "-c", "kill -STOP -1")
                wait_until(partial(self._has_restarted, victim), "killed and started again", 120)
            said.append(f"{service} {time.monotonic() - began_s:.1f} s")
            self._go_on()
            self._require_all()
        return f"killed and started again after {', '.join(said)}; {self._num_cut} answers cut"

    def freeze(self) -> str:
        """`docker pause`, as a host that stands still: no health check runs in it either."""
        for service in WORKERS:
            victim = self.slipstream.first_of(service)
            run("docker", "pause", victim.name)
            try:
                time.sleep(FROZEN_S)
                self._go_on()
            finally:
                run("docker", "unpause", victim.name)
            self._require_all()
            self._go_on()
        return f"one worker of each kind paused for {FROZEN_S:.0f} s and more"

    def cut_off(self) -> str:
        network = f"{self.slipstream.project}_ring"
        for service in WORKERS:
            victim = self.slipstream.first_of(service)
            run("docker", "network", "disconnect", network, victim.name)
            time.sleep(FROZEN_S)
            self._go_on()
            run("docker", "network", "connect", network, victim.name)
            self._require_all()
            self._go_on()
        return f"one worker of each kind without its network for {FROZEN_S:.0f} s and more"

    def end(self) -> str:
        assert self.lanes is not None
        num_answers, lanes, self.lanes = self.lanes.close(), self.lanes, None
        lanes.require_none()
        healths = lambda: [self.slipstream.health(url) for url in self.slipstream.routers()]  # noqa: E731
        wait_until(lambda: not leftovers(healths()), "all tables are empty", 30)
        self.slipstream("stop", timeout_s=200)
        return f"{num_answers} answers as before; all tables empty"

    # --- what they are made of --------------------------------------------------------------

    def close(self) -> None:
        """End the clients, whatever they still get."""
        if self.lanes is not None:
            self.lanes.stop()

    def _configured(self, tag: str) -> Deployment:
        """The project with the images of this tag."""
        changes: dict[str, dict[str, object]] = {
            service: {"image": f"slipstream-{service}:{tag}"} for service in SERVICES
        }
        changes["compute"]["environment"] = {"SLIPSTREAM_COMPUTE__SIM_STEP_BASE_S": str(STEP_S)}
        changes["router"]["environment"] = {"SLIPSTREAM_ROUTER__HOLD_S": str(HOLD_S)}
        override = Path(tempfile.gettempdir(), f"{self.slipstream.project}.json")
        override.write_text(json.dumps({"services": changes}))  # JSON is YAML
        files = ("compose.yaml", "compose.proxy.yaml", str(override))
        env = {**self.slipstream.env, "DEVICE": "sim"}
        self.slipstream = replace(self.slipstream, files=files, env=env)
        return self.slipstream

    def _up(self, tag: str) -> None:
        self._configured(tag).up(ALL, timeout_s=READY_WITHIN_S)
        self._require(ALL)

    def _go_on(self) -> None:
        """Wait until every client has an answer to a new request; none may have failed."""
        assert self.lanes is not None
        self.lanes.go_on()

    @contextlib.contextmanager
    def _cuts(self, service: str) -> Iterator[None]:
        """What runs while this happens to a router may lose its connection, and nothing else."""
        assert self.lanes is not None
        if service == "router":
            self.lanes.may_be_cut_until_s = float("inf")
        yield
        if service == "router":
            self.lanes.may_be_cut_until_s = time.monotonic()

    @property
    def _num_cut(self) -> int:
        """Answers that ended with their router, and have not been told of."""
        assert self.lanes is not None
        num_cut, self.lanes.num_cut = self.lanes.num_cut, 0
        return num_cut

    def _require_all(self) -> None:
        self.slipstream.up(ALL, "--no-recreate", timeout_s=READY_WITHIN_S)
        self._require(ALL)

    def _require(self, counts: dict[str, int]) -> None:
        """Wait until so many of each are healthy and every router knows every worker."""
        workers = {service: counts[service] for service in WORKERS}

        def holds() -> bool:
            healthy = [c.service for c in self.slipstream.containers() if c.health == "healthy"]
            if any(healthy.count(service) != n for service, n in counts.items()):
                return False
            known = [
                self.slipstream.health(url).get("workers") for url in self.slipstream.routers()
            ]
            return known == [workers] * counts["router"]

        wait_until(holds, f"healthy and registered: {counts}", READY_WITHIN_S)

    def _has_restarted(self, victim: Container) -> bool:
        now = next(c for c in self.slipstream.containers() if c.name == victim.name)
        return now.restarts > victim.restarts


def build_old_image(service: str) -> None:
    """Make an image of the release before: this code, speaking the links' protocol before."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "Dockerfile").write_text(OLD_IMAGE.format(service=service))
        code = (ROOT / "tests" / "old_release.py").read_text()
        Path(folder, "old_release.py").write_text(code)
        run("docker", "build", "--tag", f"slipstream-{service}:{BEFORE}", folder, timeout_s=300)
