"""Builds and starts Slipstream with docker compose, asks it questions by curl, scales it, kills
its containers' processes, knocks at its links, stops it, and says what held.

Needs a Docker engine with compose, and curl. Where no image can be pulled or pip needs this
machine's own settings, `--debootstrap` and `--wheelhouse` make what the build needs first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import IO, Any

from deployment import (
    CheckFailed,
    Deployment,
    compose_command,
    environment,
    free_port,
    run,
    run_steps,
    wait_until,
)
from faults import UnderLoad

LOCAL_BASE = "slipstream-base:bookworm"
WORKERS = {"tokenizer": 3, "compute": 2, "detokenizer": 2}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "Paris"
MARK = "xylophone-5309"  # a text to look for on the wire
STREAMS = 8
STREAM_TOKENS = 800  # some seconds on a CPU, and well below the 30 s that a stop gives


def deltas(stream: str) -> list[str]:
    """The pieces of text in a stream of events; fails unless the stream is complete."""
    pieces = []
    for content in events(stream):
        if "error" in content:
            raise CheckFailed(f"an error in the stream: {content}")
        pieces += [choice["delta"].get("content") or "" for choice in content["choices"]]
    return [piece for piece in pieces if piece]


def events(stream: str) -> list[dict[str, Any]]:
    """The events of a stream that must have come to its end."""
    data = [line[len("data: ") :] for line in stream.splitlines() if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        raise CheckFailed(f"the stream did not end with [DONE]: …{stream[-300:]!r}")
    return [json.loads(each) for each in data[:-1]]


def wait_registered(slipstream: Deployment, workers: dict[str, int], timeout_s: float) -> None:
    """Wait until the router knows this many workers of each kind."""
    holds = lambda: slipstream.health().get("workers") == workers  # noqa: E731
    wait_until(holds, f"registered: {workers}", timeout_s)


def wait_healthy(slipstream: Deployment, workers: dict[str, int], timeout_s: float) -> None:
    """Wait until the engine says of each container that it is healthy."""
    kinds = {"router": 1, **workers}

    def all_healthy() -> bool:
        healthy = [c.service for c in slipstream.containers() if c.health == "healthy"]
        return all(healthy.count(kind) == n for kind, n in kinds.items())

    wait_until(all_healthy, "all containers are healthy", timeout_s)


# --- the checks, in the order in which they run ----------------------------------------------


def prepare(options: argparse.Namespace, base: str) -> str:
    """The base image and the wheels, where the build can't get them by itself."""
    if options.debootstrap and not run("docker", "images", "--quiet", LOCAL_BASE).strip():
        run("deploy/base_image.sh", LOCAL_BASE, timeout_s=900)
    if options.wheelhouse:
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        version = run("docker", "run", "--rm", base, "python3", "-c", program, timeout_s=600)
        run("deploy/wheelhouse.sh", version.strip(), timeout_s=1800)
    return f"base image {base}"


def build(slipstream: Deployment) -> str:
    replace(slipstream, files=("compose.yaml", "compose.proxy.yaml"))("build", timeout_s=3600)
    return "four images of one build, and the proxy's"


def gpu_override(slipstream: Deployment) -> str:
    resolved = replace(slipstream, files=("compose.yaml", "compose.gpu.yaml"))("config")
    for part in ("target: compute-gpu", "SLIPSTREAM_COMPUTE__DEVICE: cuda", "driver: nvidia"):
        if part not in resolved:
            raise CheckFailed(f"no {part!r} in compose.yaml with compose.gpu.yaml over it")
    return "compose.gpu.yaml over compose.yaml resolves; not built, not started"


def start(slipstream: Deployment) -> str:
    began_s = time.monotonic()
    slipstream.up(WORKERS)
    wait_healthy(slipstream, WORKERS, 180)
    return f"{sum(WORKERS.values()) + 1} containers healthy in {time.monotonic() - began_s:.0f} s"


def registration(slipstream: Deployment) -> str:
    wait_registered(slipstream, WORKERS, 30)
    return f"the router knows {WORKERS}"


def ask(slipstream: Deployment, api_key: str = "") -> str:
    body = {"messages": QUESTION, "temperature": 0}
    reply = json.loads(run(*slipstream.curl(body, api_key)))
    answer = reply["choices"][0]["message"]["content"]
    if ANSWER not in answer:
        raise CheckFailed(f"the answer was {answer!r}")
    return f"{QUESTION[0]['content']} → {answer.strip()}"


def ask_streaming(slipstream: Deployment) -> str:
    body = {"messages": QUESTION, "temperature": 0, "stream": True}
    pieces = deltas(run(*slipstream.curl(body)))
    if ANSWER not in "".join(pieces) or len(pieces) < 2:
        raise CheckFailed(f"the stream said {pieces!r}")
    return f"{len(pieces)} pieces → {''.join(pieces).strip()}"


def links_refuse(slipstream: Deployment) -> str:
    """Knocks at every inbox; the one message with a known key comes through and no other does.

    A service without keys must not even start.
    """
    network, keys = f"{slipstream.project}_ring", f"{slipstream.project}_keys"
    options = ("--network", network, "--volume", f"{keys}:/keys:ro")
    knocks = json.loads(
        run(*slipstream.program("intruder.py", "routers", *WORKERS, options=options))
    )
    for who, expected in (
        ("no key", {"handshake": "refused", "sent": False}),
        ("an unknown key", {"handshake": "refused", "sent": False}),
        ("a known key", {"handshake": "let in", "sent": True}),
    ):
        if any(answer != expected for answer in knocks[who].values()):
            raise CheckFailed(f"with {who}: {knocks[who]}")
    expected_drops = [1] * len(knocks["a known key"])
    wait_until(
        lambda: dropped(slipstream) == expected_drops, "one message dropped at each inbox", 10
    )
    settings = ("SLIPSTREAM_LINKS__CURVE_DIR=", "SLIPSTREAM_LINKS__RUN_DIR=/tmp/run")
    command = ["docker", "run", "--rm", "--network", network]
    command += [part for setting in settings for part in ("--env", setting)]
    keyless = subprocess.run(
        [*command, "slipstream-tokenizer"], capture_output=True, text=True, timeout=60
    )
    if keyless.returncode != 78 or "needs keys" not in keyless.stderr:
        raise CheckFailed(f"a service without keys ended with {keyless}")
    count = len(knocks["no key"])
    return f"{count} inboxes refuse no key and an unknown key; without keys no service starts"


def dropped(slipstream: Deployment) -> list[int]:
    """Return how many messages did not parse, by each log line: what intruders send."""
    lines = [line for line in slipstream("logs", "--no-color").splitlines() if "not parse" in line]
    return [json.loads(line[line.index("{") :])["num_malformed"] for line in lines]


def links_encrypt(slipstream: Deployment) -> str:
    """Looks for a prompt's text in what the router's container sends and receives."""
    network = f"container:{slipstream.first_of('router').name}"
    options = ("--network", network, "--user", "0", "--cap-drop", "ALL", "--cap-add", "NET_RAW")
    command = slipstream.program("wire_tap.py", MARK, options=options)
    question = [{"role": "user", "content": f"Repeat after me: {MARK}"}]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as tap:
        assert tap.stdout is not None
        tap.stdout.readline()
        run(*slipstream.curl({"messages": question, "max_tokens": 20}))
        heard = json.loads(tap.communicate(timeout=30)[0])
    seen, num_bytes = heard["seen"], heard["bytes"]
    if not seen["8000"] or seen["7000"] or num_bytes["7000"] < 1000:
        raise CheckFailed(f"the text went by in these packets: {heard}")
    return f"a prompt is seen on the API's port, and not in {num_bytes['7000']} bytes of the links"


def scale(slipstream: Deployment) -> str:
    for workers in ({**WORKERS, "tokenizer": 1}, {**WORKERS, "compute": 3}, WORKERS):
        slipstream.up(workers)
        wait_registered(slipstream, workers, 60)
        ask(slipstream)
    return "tokenizer 3 → 1 → 3 and compute 2 → 3 → 2, a question answered at each step"


def kill(slipstream: Deployment) -> str:
    """Kills the process, not the container: the engine must start it again by itself."""
    said = []
    for service in (*WORKERS, "router"):
        victim = slipstream.first_of(service)
        run("docker", "exec", victim.name, "sh", "-c", "kill -9 -1")
        began_s = time.monotonic()
        wait_until(partial(answers, slipstream), f"questions are answered without {service}", 30)
        said.append(f"{service} {time.monotonic() - began_s:.1f} s")
        wait_until(partial(restarted, slipstream, victim.restarts, service), "restarted", 60)
        wait_healthy(slipstream, WORKERS, 90)
        wait_registered(slipstream, WORKERS, 30)
    return f"four questions in a row answered after the death of: {', '.join(said)}"


def answers(slipstream: Deployment) -> bool:
    with contextlib.suppress(CheckFailed):
        return all(ask(slipstream) for _ in range(4))
    return False


def restarted(slipstream: Deployment, times: int, service: str) -> bool:
    return slipstream.first_of(service).restarts > times


def api_keys(slipstream: Deployment) -> str:
    locked = replace(slipstream, env={**slipstream.env, "API_KEYS": "one,two"})
    locked.up(WORKERS)
    wait_healthy(locked, WORKERS, 60)
    wait_registered(locked, WORKERS, 30)
    ask(locked, "two")
    for key in ("", "three"):
        refused = subprocess.run(
            locked.curl({"messages": QUESTION}, key), capture_output=True, text=True, timeout=60
        )
        if "invalid_api_key" not in refused.stdout:
            raise CheckFailed(f"the answer to the key {key!r}: {refused.stdout}")
    slipstream.up(WORKERS)
    wait_healthy(slipstream, WORKERS, 60)
    wait_registered(slipstream, WORKERS, 30)
    return (
        "with API_KEYS only those who show one are answered; the container is healthy all the same"
    )


def stop(slipstream: Deployment) -> str:
    """Stops everything while streams run: they must end as they would have."""
    body = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(STREAMS)]
        clients = [subprocess.Popen(slipstream.curl(body), stdout=file) for file in files]
        for file in files:
            wait_until(partial(has_begun, file), "the stream begins", 30)
        began_s = time.monotonic()
        stopping = subprocess.Popen(
            slipstream.command("stop"), env=slipstream.env, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: not slipstream.health(), "it accepts nobody", 10)
        num_running = sum(client.poll() is None for client in clients)
        if stopping.wait(90):
            raise CheckFailed("the stop failed")
        seconds = time.monotonic() - began_s
        for client, file in zip(clients, files, strict=True):
            file.seek(0)
            usage = events(file.read())[-1]["usage"]["completion_tokens"]
            if client.wait(5) or usage != STREAM_TOKENS:
                raise CheckFailed(f"a stream ended after {usage} tokens")
    bad = [f"{c.name}: {c.exit_code}" for c in slipstream.containers() if c.exit_code]
    if bad or num_running < STREAMS:
        raise CheckFailed(f"{num_running} streams ran; exit codes after the stop: {bad}")
    return f"in {seconds:.1f} s; {num_running} running streams had all their tokens; exit codes 0"


def has_begun(file: IO[str]) -> bool:
    return file.seek(0, 2) > 0


def state(slipstream: Deployment) -> str:
    """What to look at after a failure."""
    return slipstream("ps", "--all") + slipstream("logs", "--no-color", "--tail", "40")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--debootstrap", action="store_true", help="make the base image here")
    parser.add_argument("--base-image", help="the base image; default: the Dockerfile's")
    parser.add_argument("--wheelhouse", action="store_true", help="fetch the wheels by host's pip")
    parser.add_argument("--project", default="slipstream-check", help="name of the project")
    parser.add_argument("--port", type=int, default=0, help="port of the router; default: any")
    parser.add_argument("--keep", action="store_true", help="leave containers and volumes")
    parser.add_argument(
        "--only-load", action="store_true", help="only build, and what is under load"
    )
    options = parser.parse_args()

    base = options.base_image or (LOCAL_BASE if options.debootstrap else "python:3.12-slim")
    port = options.port or free_port()
    slipstream = Deployment(compose_command(), options.project, port, environment(base, port))
    checks = (build, gpu_override, start, registration, ask, ask_streaming, links_refuse)
    checks += (links_encrypt, scale, kill, api_keys, stop)
    steps: list[tuple[str, Callable[[], str]]] = [("prepare", partial(prepare, options, base))]
    steps += [(check.__name__, partial(check, slipstream)) for check in checks]
    under_load = UnderLoad(slipstream)
    if slipstream.compose == ["docker-compose"]:
        print("skipped under load: that needs Compose 2.24.4 or later")
    else:
        steps += under_load.steps()
    if options.only_load:
        steps = [*steps[:2], *under_load.steps()]
    try:
        return run_steps(steps, partial(state, slipstream))
    finally:
        under_load.close()
        if not options.keep:
            under_load.slipstream("down", "--volumes", "--timeout", "5")


if __name__ == "__main__":
    sys.exit(main())
