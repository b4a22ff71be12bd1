"""What the Kubernetes check runs: the pods of all Deployments, and clients that ask them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator

from compose_check import ANSWER, QUESTION, deltas
from deployment import CheckFailed, run, wait_until
from manifests import Manifest
from pods import Node, Pod

SERVICES = ("router", "tokenizer", "compute", "detokenizer")
KEY = "sk-of-the-check"
STORY = [{"role": "user", "content": "Tell me a story."}]
STORY_TOKENS = 1500  # some ten seconds on a busy CPU
LINKS, HTTP = 7000, 8000
ESTABLISHED = "01"


class Stack:
    """The pods of all Deployments, and clients that ask the ready routers in turn."""

    def __init__(self, manifests: list[Manifest], node: Node, replicas: int) -> None:
        self.manifests = manifests
        self._node = node
        self.pods: list[Pod] = []
        self.made: list[Pod] = []
        self._deployments = {
            each["metadata"]["labels"]["app.kubernetes.io/component"]: each
            for each in manifests
            if each["kind"] == "Deployment"
        }
        self._replicas = replicas
        self._num_asked = 0
        for service in manifests:
            if service["kind"] == "Service" and service["spec"].get("clusterIP") == "None":
                node.aliases[service["metadata"]["name"]] = service["spec"]["selector"]

    def of(self, component: str) -> list[Pod]:
        """The pods of one service."""
        return [pod for pod in self.pods if pod.component == component]

    def add(self, component: str) -> Pod:
        """Start one more pod of a service."""
        pod = Pod(self._node, self._deployments[component], len(self.made))
        self.made.append(pod)
        self.pods.append(pod)
        pod.start()
        return pod

    def start(self) -> None:
        for component in SERVICES:
            number = self._deployments[component]["spec"].get("replicas", self._replicas)
            for _ in range(number):
                self.add(component)

    def wait_ready(self, timeout_s: float = 600) -> None:
        wait_until(lambda: all(pod.is_ready for pod in self.pods), "all pods are ready", timeout_s)

    def curl(self, body: dict[str, object], router: Pod | None = None, key: str = KEY) -> list[str]:
        """The command that asks a router, one that is ready unless one is named."""
        if router is None:
            ready = [pod for pod in self.of("router") if pod.is_ready]
            if not ready:
                raise CheckFailed("no router is ready")
            self._num_asked += 1
            router = ready[self._num_asked % len(ready)]
        url = f"http://{router.address}:{HTTP}/v1/chat/completions"
        command = ["curl", "--silent", "--show-error", "--fail-with-body", "--no-buffer", url]
        command += ["--header", "Content-Type: application/json"]
        command += ["--header", f"Authorization: Bearer {key}"]
        return [*command, "--data", json.dumps({"model": "demo", "temperature": 0, **body})]

    def ask(self, router: Pod | None = None) -> str:
        body = {"messages": QUESTION}
        reply = json.loads(run(*self.curl(body, router), timeout_s=120))
        answer = str(reply["choices"][0]["message"]["content"]).strip()
        if ANSWER not in answer:
            raise CheckFailed(f"the answer was {answer!r}")
        return answer

    def connections(self) -> set[tuple[str, str, int]]:
        """Who is connected with whom, at which port: components, as the kernels say."""
        owners = {pod.address: pod.component for pod in self.pods}
        found = set()
        for pod in self.pods:
            for line in pod.exec("cat", "/proc/net/tcp").stdout.splitlines()[1:]:
                remote, state = line.split()[2:4]
                host, port = remote.split(":")
                octets = [str(int(host[at : at + 2], 16)) for at in (6, 4, 2, 0)]
                if state == ESTABLISHED and int(port, 16) in (LINKS, HTTP):
                    receiver = owners.get(".".join(octets), ".".join(octets))
                    found.add((pod.component, receiver, int(port, 16)))
        return found


class Stream(threading.Thread):
    """One story, streamed; it must come whole, with the text of the story before."""

    def __init__(self, stack: Stack, router: Pod) -> None:
        super().__init__(daemon=True)
        body = {"messages": STORY, "max_tokens": STORY_TOKENS, "ignore_eos": True, "stream": True}
        self._command = stack.curl(body, router)
        self.text = self.failure = ""
        self.longest_gap_s = 0.0
        self.num_events = 0
        self.start()

    def run(self) -> None:
        said, before_s = [], time.monotonic()
        with subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True) as curl:
            assert curl.stdout is not None
            for line in curl.stdout:
                said.append(line)
                if line.startswith("data:"):
                    now_s = time.monotonic()
                    self.longest_gap_s = max(self.longest_gap_s, now_s - before_s)
                    before_s, self.num_events = now_s, self.num_events + 1
        try:
            self.text = "".join(deltas("".join(said)))
        except (CheckFailed, KeyError, ValueError) as failure:
            self.failure = repr(failure)


@contextlib.contextmanager
def streams(stack: Stack, routers: list[Pod], story: str) -> Iterator[list[Stream]]:
    """Streams through these routers that run while something happens, and must be complete."""
    running = [Stream(stack, router) for router in routers for _ in range(2)]
    wait_until(lambda: all(each.num_events > 20 for each in running), "the streams run", 60)
    yield running
    for each in running:
        each.join(180)
        if each.failure or each.text != story:
            raise CheckFailed(f"a stream was cut or altered: {each.failure or each.text[-200:]!r}")


def tell(stack: Stack) -> str:
    """The story without a fault."""
    told = Stream(stack, stack.of("router")[0])
    told.join(180)
    if not told.text:
        raise CheckFailed(f"no story: {told.failure}")
    return told.text
