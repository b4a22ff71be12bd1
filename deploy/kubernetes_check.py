"""Runs the Kubernetes manifests without a cluster: each container on a Docker engine with exactly
their command, environment, mounts, user, limits, probes and stop signals. Asks the stack questions,
looks at what its pods may do and whom they talk with, ends, hangs and cuts off one of each service
amid streams, and says what held. First all overlays are checked against the schemas of Kubernetes.

Needs root, a Docker engine, kubectl, helm, kubernetes-validate, curl, and images of this source:

    for each in keys router tokenizer compute detokenizer; do
      docker build --file deploy/Dockerfile --target $each --tag slipstream-$each:0.1.0 . ; done
    sudo python3 deploy/kubernetes_check.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

from compose_check import ANSWER, QUESTION
from deployment import CheckFailed, run, wait_until
from manifests import (
    BASE,
    KUBERNETES,
    Manifest,
    charted,
    differences,
    edges,
    invalid,
    kustomized,
    lost_by_kubectl,
    name_of,
    overlays,
    unrestricted,
)
from pods import Node
from stack import KEY, LINKS, SERVICES, STORY, Stack, streams, tell

VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))


# --- the checks, in the order in which they run ----------------------------------------------


def offline(_: Stack) -> str:
    """Render the base and all overlays, by kustomize and by Helm, and judge what comes out."""
    num_objects = 0
    for folder in (BASE, *overlays()):
        rendered = kustomized(folder)
        charts = charted(folder / "values.yaml" if folder != BASE else None)
        wrong = differences(rendered, charts)
        wrong += [what for each in rendered for what in unrestricted(each)]
        wrong += lost_by_kubectl([each for each in rendered if each["kind"] == "Deployment"])
        wrong += [
            f"{version}: {why}"
            for version in VERSIONS
            for each in rendered
            if (why := invalid(each, version))
        ]
        if wrong:
            raise CheckFailed(f"{folder.name}: {wrong}")
        num_objects += len(rendered)
    return (
        f"{num_objects} objects of {1 + len(overlays())} folders, {VERSIONS[0]} to {VERSIONS[-1]}"
    )


def start(stack: Stack) -> str:
    stack.start()
    stack.wait_ready()
    return f"{len(stack.pods)} pods ready by their own probes"


def answers(stack: Stack) -> str:
    said = [stack.ask(router) for router in stack.of("router")]
    refused = subprocess.run(stack.curl({"messages": QUESTION}, key="wrong"), capture_output=True)
    if b"invalid_api_key" not in refused.stdout:
        raise CheckFailed(f"a wrong key was answered with {refused.stdout!r}")
    return f"each router: {said[0]}; a wrong key is refused"


def confinement(stack: Stack) -> str:
    """What the processes of each container may do, as their kernel says."""
    wanted = {"Uid": "10001", "Gid": "10001", "CapEff": "0" * 16, "CapBnd": "0" * 16}
    wanted |= {"NoNewPrivs": "1", "Seccomp": "2"}
    for pod in stack.pods:
        lines = pod.exec("cat", "/proc/self/status").stdout.splitlines()
        status = {line.partition(":")[0]: line.split()[1:2] for line in lines}
        for name, value in wanted.items():
            if status[name] != [value]:
                raise CheckFailed(f"{pod.name}: {name} is {status[name]} and not {value}")
        for path in ("/opt/x", "/etc/x", "/var/lib/slipstream/keys/x"):
            if pod.exec("touch", path).returncode == 0:
                raise CheckFailed(f"{pod.name} can write {path}")
        others = set(SERVICES) - {pod.component}
        for other in others:
            if pod.exec("test", "-e", f"/var/lib/slipstream/keys/{other}.secret").returncode == 0:
                raise CheckFailed(f"{pod.name} has the secret key of {other}")
    return "user 10001, no capabilities, no new privileges, a read-only root, own keys alone"


def network(stack: Stack) -> str:
    """Every connection between pods is one that the policies allow, and each that they allow is."""
    allowed, _ = edges(stack.manifests, LINKS)
    body = {"messages": STORY, "max_tokens": 30, "stop": ["the"]}  # a stop string makes an abort
    run(*stack.curl(body), timeout_s=60)
    used = {(sender, receiver) for sender, receiver, port in stack.connections() if port == LINKS}
    if used - allowed:
        raise CheckFailed(f"connections that no policy allows: {sorted(used - allowed)}")
    idle = sorted(f"{sender} to {receiver}" for sender, receiver in allowed - used)
    return f"{len(used)} kinds of connections, all allowed; unused now: {', '.join(idle) or 'none'}"


def drain(stack: Stack) -> str:
    """End one pod of each service amid streams through all routers; its successor comes at once."""
    story = tell(stack)
    said = []
    for component in SERVICES:
        leaving = stack.of(component)[0]
        with streams(stack, stack.of("router"), story):
            stack.add(component)
            status, took_s = leaving.delete()
            stack.pods.remove(leaving)
            stack.wait_ready()
        grace_s = leaving.spec["terminationGracePeriodSeconds"]
        if status or took_s >= grace_s:
            raise CheckFailed(f"{leaving.name} ended with {status} after {took_s:.0f} s")
        said.append(f"{component} {took_s:.0f} s of {grace_s}")
    return "; ".join(said)


def hang(stack: Stack) -> str:
    """Stop the process of one pod of each service: its liveness probe fails, and it comes back."""
    story = tell(stack)
    said = []
    for component in SERVICES:
        hanging, *others = stack.of(component)
        routers = others if component == "router" else stack.of("router")
        with streams(stack, routers, story):
            began_s = time.monotonic()
            hanging.hang()
            restarted = lambda pod=hanging: pod.num_restarts == 1  # noqa: E731
            wait_until(restarted, f"{hanging.name} is restarted", 60)
            restart_s = time.monotonic() - began_s
            stack.wait_ready()
        if hanging.said[:1] != ["livenessProbe failed"] or hanging.num_restarts != 1:
            raise CheckFailed(f"{hanging.name}: {hanging.said}")
        said.append(f"{component} {restart_s:.0f} s, ready after {time.monotonic() - began_s:.0f}")
    return "; ".join(said)


def node_lost(stack: Stack) -> str:
    """Cut off one pod of each service at once, as a node that dies; others are made for them."""
    story = tell(stack)
    lost = [stack.of(component)[0] for component in SERVICES]
    kept = [pod for pod in stack.of("router") if pod not in lost]
    with streams(stack, kept, story) as running:
        for pod in lost:
            pod.vanish()
            stack.pods.remove(pod)
        stack.ask(kept[0])
        for component in SERVICES:
            stack.add(component)
        stack.wait_ready()
    for pod in lost:
        pod.remove()
    gap_s = max(each.longest_gap_s for each in running)
    return f"streams of the other router pause for {gap_s:.1f} s at most and go on"


def from_none(stack: Stack) -> str:
    """Where compute is scaled to none, a router is ready all the same, and holds a request."""
    probe = stack.of("router")[0].container["readinessProbe"]
    if "--live" not in probe["exec"]["command"]:
        return "not here: routers without workers are not ready"
    for pod in stack.of("compute"):
        pod.delete()
        stack.pods.remove(pod)
    time.sleep(probe["periodSeconds"] * (probe["failureThreshold"] + 1))
    command, began_s = stack.curl({"messages": QUESTION}), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as held:
        stack.add("compute")
        reply = json.loads(held.communicate(timeout=300)[0])
    if ANSWER not in reply["choices"][0]["message"]["content"]:
        raise CheckFailed(f"the answer was {reply}")
    return f"a request without a compute was answered after {time.monotonic() - began_s:.0f} s"


def untouched(stack: Stack) -> str:
    """Nothing was restarted but what this check stopped."""
    stack.ask()
    restarts = sum(pod.num_restarts for pod in stack.made)
    hangs = [event for pod in stack.made for event in pod.said if event == "livenessProbe failed"]
    if restarts != len(hangs) or restarts > len(SERVICES):
        raise CheckFailed(f"events: {[pod.said for pod in stack.made]}")
    return f"{restarts} restarts of {len(stack.made)} pods"


CHECKS = (
    offline,
    start,
    answers,
    confinement,
    network,
    drain,
    hang,
    node_lost,
    from_none,
    untouched,
)


def made_secrets(node: Node) -> dict[str, dict[str, bytes]]:
    """The two Secrets, made as docs/deploy/kubernetes.md says."""
    folder = node.folder / "keys"
    folder.mkdir()
    folder.chmod(0o777)
    image = f"slipstream-keys:{node.tag}"
    program = ("slipstream", "keys", "/keys/made")
    run("docker", "run", "--rm", "--user", "0", "--volume", f"{folder}:/keys", image, *program)
    api_keys = f'[[key]]\nname = "check"\nkey = "{KEY}"\n'
    tomllib.loads(api_keys)
    return {
        "slipstream-links": {path.name: path.read_bytes() for path in folder.glob("made/*")},
        "slipstream-api": {"api-keys.toml": api_keys.encode(), "metrics-token": b"scraper"},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tag", default="0.1.0", help="of the images")
    parser.add_argument("--overlay", default="", help="one of overlays/; default: the base")
    parser.add_argument("--helm", action="store_true", help="render the chart")
    parser.add_argument("--keep", action="store_true", help="leave containers")
    parser.add_argument("--only", help="names of checks, with commas")
    options = parser.parse_args()

    folder = KUBERNETES / "overlays" / options.overlay if options.overlay else BASE
    values = folder / "values.yaml" if options.overlay else None
    manifests = charted(values) if options.helm else kustomized(folder)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as path:
        node = Node("slipstream-manifests", options.tag, Path(path))
        node.folder.chmod(0o755)
        run("docker", "network", "create", node.network)
        stack = Stack(manifests, node, 2)
        try:
            node.secrets = made_secrets(node)
            print(f"{len(manifests)} objects, {', '.join(sorted(set(map(kind_of, manifests))))}")
            chosen = options.only.split(",") if options.only else None
            checks = [each for each in CHECKS if chosen is None or each.__name__ in chosen]
            return run_checks(stack, checks)
        finally:
            if not options.keep:
                for pod in stack.made:
                    pod.remove()
                run("docker", "network", "rm", node.network)


def kind_of(manifest: Manifest) -> str:
    return name_of(manifest).partition(" ")[0]


def run_checks(stack: Stack, checks: list[Callable[[Stack], str]]) -> int:
    for check in checks:
        began_s = time.monotonic()
        try:
            said = check(stack)
        except (CheckFailed, subprocess.TimeoutExpired, KeyError, ValueError) as failure:
            print(f"FAILED  {check.__name__}: {failure!r}", flush=True)
            for pod in stack.pods:
                print(pod.name, "ready" if pod.is_ready else "not ready", pod.said)
                print(pod.log())
            return 1
        name = check.__name__.replace("_", " ")
        print(f"ok      {name:<12}{time.monotonic() - began_s:7.1f} s  {said}", flush=True)
    print(f"all {len(checks)} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
