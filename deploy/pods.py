"""Pods on a Docker engine, as a kubelet would run them, by nothing but their manifests.

What is emulated: the pod's network and process namespaces, user, groups, capabilities, read-only
roots, limits, Secrets with their links and modes, memory-backed folders, variables out of Secrets
and requests, probes with their periods and thresholds, restarts, preStop and the grace period.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deployment import CheckFailed, run
from manifests import Manifest

UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "m": 1e-3}
LEAST_GRACE_S = 2  # what a kubelet gives a container that it stops, however short its grace is
FIRST_BACKOFF_S = 10.0


def quantity(text: str | int) -> float:
    """A quantity of Kubernetes as a number: bytes, or CPUs."""
    digits = str(text).rstrip("KMGim")
    return float(digits) * UNITS[str(text)[len(digits) :]]


@dataclass
class Node:
    """The Docker network that the pods share, and the Secrets that they may ask for."""

    network: str
    tag: str
    folder: Path
    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)  # Services: their selectors

    def image(self, name: str) -> str:
        """The image of a manifest, with the tag that was built here."""
        return f"{name.rpartition(':')[0]}:{self.tag}"


class Pod:
    """One pod of a Deployment: `docker run` with what the manifest says, and its probes."""

    def __init__(self, node: Node, deployment: Manifest, index: int) -> None:
        template = deployment["spec"]["template"]
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.component = self.labels["app.kubernetes.io/component"]
        self.spec: Manifest = template["spec"]
        (self.container,) = self.spec["containers"]
        self.name = f"{node.network}-{self.component}-{index}"
        self.main = f"{self.name}-main"
        self.num_restarts = 0
        self.is_started = self.is_ready = self.is_ended = False
        self.said: list[str] = []  # events, as `kubectl describe` would show them
        self._node = node
        self._volumes: dict[str, str] = {}  # by name: what `docker run --mount` calls them
        self._lock = threading.RLock()

    @property
    def address(self) -> str:
        """Its IP address."""
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return run("docker", "inspect", "--format", form, f"{self.name}-pause").strip()

    def start(self) -> None:
        """Make the pod's namespaces and volumes, start its container and watch over it."""
        aliases = [
            part
            for name, selector in self._node.aliases.items()
            if selector.items() <= self.labels.items()
            for part in ("--network-alias", name)
        ]
        self._volumes = {each["name"]: self._volume(each) for each in self.spec["volumes"]}
        held = [
            part
            for name, volume in self._volumes.items()
            if volume.startswith("type=volume")  # it lives for as long as a container has it
            for part in ("--mount", f"{volume},dst=/held/{name}")
        ]
        run(
            *("docker", "run", "--detach", "--init", "--name", f"{self.name}-pause"),
            *("--network", self._node.network, "--user", "65535", "--cap-drop", "ALL"),
            *(*aliases, *held, f"slipstream-keys:{self._node.tag}", "sleep", "infinity"),
        )
        self._start_container()
        for watch in (self._start_up, self._watch_end):
            threading.Thread(target=watch, daemon=True).start()

    def exec(self, *command: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a command in its container."""
        whole = ["docker", "exec", self.main, *command]
        return subprocess.run(whole, capture_output=True, text=True, timeout=timeout_s)

    def hang(self) -> None:
        """Stop its process, as a debugger or a bug would."""
        beacon = f"/tmp/slipstream/{self.component}.beacon"
        program = f"import os; os.kill(int(open('{beacon}').read().split()[0]), 19)"
        done = self.exec("python3", "-c", program)
        if done.returncode:
            raise CheckFailed(f"{self.name}: {done.stderr}")

    def delete(self) -> tuple[int, float]:
        """End it as `kubectl delete pod` does; returns its exit status and how long that took."""
        began_s = time.monotonic()
        self.is_ended = True
        self.is_ready = False
        self._stop(self.spec["terminationGracePeriodSeconds"])
        status = int(self._state("ExitCode"))
        took_s = time.monotonic() - began_s
        self.remove()
        return status, took_s

    def vanish(self) -> None:
        """Be cut off with its node: nothing that it sends arrives any more, nor is refused."""
        self.is_ended = True
        self.is_ready = False
        run("docker", "network", "disconnect", "--force", self._node.network, f"{self.name}-pause")

    def remove(self) -> None:
        """Remove containers and volumes."""
        self.is_ended = True
        for name in (self.main, f"{self.name}-pause"):
            subprocess.run(["docker", "rm", "--force", "--volumes", name], capture_output=True)
        for volume in self._volumes.values():
            kind, source = volume.split(",src=")
            if kind == "type=volume":
                subprocess.run(["docker", "volume", "rm", source], capture_output=True)
            else:
                shutil.rmtree(source, ignore_errors=True)

    def log(self) -> str:
        """The last lines that its container wrote."""
        whole = ["docker", "logs", "--tail", "15", self.main]
        done = subprocess.run(whole, capture_output=True, text=True)
        return done.stdout + done.stderr

    # --- what a kubelet does -----------------------------------------------------------------

    def _volume(self, volume: Manifest) -> str:
        name, group = f"{self.name}-{volume['name']}", self.spec["securityContext"]["fsGroup"]
        if "emptyDir" in volume:
            size = int(quantity(volume["emptyDir"].get("sizeLimit", "1Gi")))
            options = ["type=tmpfs", "device=tmpfs", f"o=size={size},mode=2777,gid={group}"]
            given = [part for option in options for part in ("--opt", option)]
            run("docker", "volume", "create", "--driver", "local", *given, name)
            return f"type=volume,src={name}"
        secret = volume["secret"]
        folder = self._node.folder / name
        data = folder / "..data"
        (folder / "..2026").mkdir(parents=True)
        data.symlink_to("..2026")
        for item in secret["items"]:
            path = data / item["path"]
            path.write_bytes(self._node.secrets[secret["secretName"]][item["key"]])
            os.chown(path, 0, group)
            path.chmod(secret["defaultMode"])
            (folder / item["path"]).symlink_to(f"..data/{item['path']}")
        return f"type=bind,src={folder}"

    def _environment(self) -> dict[str, str]:
        found = {}
        for each in self.container["env"]:
            source = each.get("valueFrom", {})
            if "secretKeyRef" in source:
                key = source["secretKeyRef"]
                value = self._node.secrets[key["name"]][key["key"]].decode()
            elif "resourceFieldRef" in source:
                kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
                value = str(math.ceil(quantity(self.container["resources"][kind][resource])))
            else:
                value = each["value"]
            found[each["name"]] = value
        return found

    def _start_container(self) -> None:
        pod, own = self.spec["securityContext"], self.container["securityContext"]
        resources = self.container["resources"]
        limits = resources["limits"]
        options = ["--network", f"container:{self.name}-pause"]
        if self.spec.get("shareProcessNamespace"):
            options += ["--pid", f"container:{self.name}-pause"]
        options += ["--user", f"{pod['runAsUser']}:{pod['runAsGroup']}"]
        options += ["--group-add", str(pod["fsGroup"])]
        options += ["--read-only"] if own["readOnlyRootFilesystem"] else []
        options += [f"--cap-drop={each}" for each in own["capabilities"]["drop"]]
        if not own["allowPrivilegeEscalation"]:
            options += ["--security-opt", "no-new-privileges"]
        memory = str(int(quantity(limits["memory"])))
        options += ["--memory", memory, "--memory-swap", memory]
        options += ["--cpu-shares", str(int(quantity(resources["requests"]["cpu"]) * 1024))]
        options += ["--cpus", str(quantity(limits["cpu"]))] if "cpu" in limits else []
        for mount in self.container["volumeMounts"]:
            mode = ",readonly" if mount.get("readOnly") else ""
            where = f"{self._volumes[mount['name']]},dst={mount['mountPath']}{mode}"
            options += ["--mount", where]
        for name, value in self._environment().items():
            options += ["--env", f"{name}={value}"]
        image = self._node.image(self.container["image"])
        command = [*self.container.get("command", []), *self.container.get("args", [])]
        run("docker", "run", "--detach", "--name", self.main, *options, image, *command)

    def _probe(self, name: str) -> bool:
        probe = self.container[name]
        try:
            done = self.exec(*probe["exec"]["command"], timeout_s=probe.get("timeoutSeconds", 1))
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _watch(self, name: str, judge: Callable[[bool], bool]) -> None:
        """Probe at its period, until it says that this is enough or the pod ends."""
        while not self.is_ended:
            began_s = time.monotonic()
            if judge(self._probe(name)):
                return
            period_s = self.container[name].get("periodSeconds", 10)
            time.sleep(max(0.0, period_s - (time.monotonic() - began_s)))

    def _start_up(self) -> None:
        failures = 0

        def judge(succeeded: bool) -> bool:
            nonlocal failures
            failures = 0 if succeeded else failures + 1
            if failures >= self.container["startupProbe"]["failureThreshold"]:
                self._restart("startupProbe")
                failures = 0
            return succeeded

        self._watch("startupProbe", judge)
        self.is_started = not self.is_ended
        for name, watch in (("livenessProbe", self._live), ("readinessProbe", self._ready)):
            threading.Thread(target=watch, args=(name, self.num_restarts), daemon=True).start()

    def _live(self, name: str, restarts: int) -> None:
        failures = 0

        def judge(succeeded: bool) -> bool:
            nonlocal failures
            failures = 0 if succeeded else failures + 1
            if self.num_restarts != restarts:  # it ended by itself meanwhile
                return True
            if failures >= self.container[name]["failureThreshold"]:
                self._restart(name)
                return True
            return False

        self._watch(name, judge)

    def _ready(self, name: str, restarts: int) -> None:
        failures = 0

        def judge(succeeded: bool) -> bool:
            nonlocal failures
            failures = 0 if succeeded else failures + 1
            if self.is_ended or self.num_restarts != restarts:
                return True
            if succeeded:
                self.is_ready = True
            elif failures >= self.container[name]["failureThreshold"]:
                self.is_ready = False
            return False

        self._watch(name, judge)

    def _watch_end(self) -> None:
        """Start the container again when its process ends, with a kubelet's first backoff."""
        while not self.is_ended:
            time.sleep(0.2)
            with self._lock:
                if self.is_ended or self._state("Running") == "true":
                    continue
                status = self._state("ExitCode")
            self.said.append(f"exited with {status}")
            if self.num_restarts:
                time.sleep(FIRST_BACKOFF_S)
            if not self.is_ended:
                self._replace()

    def _restart(self, why: str) -> None:
        if self.is_ended:
            return
        probe_s = self.container[why].get("terminationGracePeriodSeconds")
        with self._lock:
            self.said.append(f"{why} failed")
            self._stop(self.spec["terminationGracePeriodSeconds"] if probe_s is None else probe_s)
            self._replace()

    def _replace(self) -> None:
        with self._lock:
            if self.is_ended or self._state("Running") == "true":
                return
            self.is_started = self.is_ready = False
            self.num_restarts += 1
            run("docker", "rm", "--force", self.main)
            self._start_container()
        threading.Thread(target=self._start_up, daemon=True).start()

    def _stop(self, grace_s: float) -> None:
        """Run preStop, then send the image's stop signal, and SIGKILL when the grace is over."""
        began_s = time.monotonic()
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook:
            try:
                self.exec(*hook["exec"]["command"], timeout_s=grace_s)
            except subprocess.TimeoutExpired:
                self.said.append("preStop did not end")
        left_s = math.ceil(max(LEAST_GRACE_S, grace_s - (time.monotonic() - began_s)))
        run("docker", "stop", "--time", str(left_s), self.main, timeout_s=left_s + 30)

    def _state(self, what: str) -> str:
        whole = ["docker", "inspect", "--format", "{{.State." + what + "}}", self.main]
        return subprocess.run(whole, capture_output=True, text=True).stdout.strip()
