"""A ring on four hosts with networks of their own: cut off and healed, and no client sees it.

The router and a tokenizer are on the first host, a compute on the second, another one and a
detokenizer on the third, and another detokenizer on the fourth.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from benchmarks.chaos_hosts import HostsRing
from benchmarks.chaos_requests import KINDS, prepare_folder
from benchmarks.chaos_ring import DOWN, DROP, Strike, unexpected_errors
from benchmarks.chaos_run import Load, Tally, strike_once
from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.gpu_server import wait_clean
from benchmarks.hosts import PREFIX, Hosts, remove_abandoned, why_not
from benchmarks.stack import ROOT
from tests.cases import num_cases
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there are hosts")
LAYOUT = {
    "router": ("router-0", "tokenizer-0"),
    "gpu": ("compute-0",),
    "both": ("compute-1", "detokenizer-0"),
    "text": ("detokenizer-1",),
}
SETTINGS = {
    "compute.device": "sim",
    "compute.sim_step_base_s": 0.02,
    "compute.max_model_len": 8192,
    "router.hold_s": PATIENCE_S,
}
NUM_TOKENS = 160  # 3.2 s: longer than it takes to find a cut


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """A ring of hosts, and the answers that it gives without a fault."""
    folder = tmp_path_factory.mktemp("models") / "sim"
    prepare_folder(make_folder(folder, SHAPES["tiny"]))
    with Hosts(folder, LAYOUT, SETTINGS) as hosts:
        ring = HostsRing(hosts, (0.0,))  # each cut until it is found
        found = Load(ring, KINDS, NUM_TOKENS, "sim")
        found.learn(len(KINDS))
        yield found
        assert unexpected_errors(hosts) == []


def check(load: Load, tally: Tally) -> None:
    assert (tally.num_failed, tally.problems) == (0, [])
    assert wait_clean(load.ring.hosts, 1, PATIENCE_S) == ()


def lost_by(hosts: Hosts, strike: Strike) -> set[str]:
    """Return the endpoints of workers that the router has lost since; print how soon."""
    lost = []
    since_s = time.time() - (time.monotonic() - strike.at_s)
    for line in hosts.log("router-0").splitlines():
        entry = json.loads(line)
        at_s = datetime.fromisoformat(entry["timestamp"]).timestamp()
        if entry["event"] == "worker lost" and at_s >= since_s:
            lost.append(entry["endpoint"].removeprefix("tcp://"))
            print(f"{lost[-1]} lost after {at_s - since_s:.2f} s")  # noqa: T201
    return set(lost)


@pytest.mark.parametrize(
    ("host", "fault"), [("gpu", DROP), ("both", DOWN), ("text", DROP)][: num_cases(2, 3)]
)
def test_a_host_that_is_cut_off_and_healed_costs_no_request(
    load: Load, host: str, fault: str
) -> None:
    hosts = load.ring.hosts
    row = strike_once(load, load.ring.host(host), fault, len(KINDS))
    check(load, row.tally)
    endpoints = {hosts.instances[name].endpoint for name in LAYOUT[host]}
    assert lost_by(hosts, row.strike) >= endpoints
    if host == "gpu":  # in a step it may be silent for longer than that
        assert "its host does not answer" in hosts.log("router-0")


def test_when_the_routers_host_is_cut_off_from_all_its_requests_wait(load: Load) -> None:
    hosts = load.ring.hosts
    row = strike_once(load, load.ring.host("router"), DROP, len(KINDS))
    check(load, row.tally)
    others = {name for names in list(LAYOUT.values())[1:] for name in names}
    assert lost_by(hosts, row.strike) >= {hosts.instances[name].endpoint for name in others}


def test_what_an_earlier_attempt_still_says_after_the_heal_is_dropped(load: Load) -> None:
    """The link is still the same then, and has kept what was said meanwhile."""
    short = Load(
        HostsRing(load.ring.hosts, (2.6,)), KINDS, NUM_TOKENS, "sim", load.answers, load.gaps_s
    )
    check(short, strike_once(short, short.ring.host("text"), DROP, len(KINDS)).tally)


def test_what_a_killed_run_has_left_is_removed_by_the_next() -> None:
    code = (
        "import os, signal; from benchmarks.hosts import Network; "
        "Network(['one', 'two']); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    assert killed.wait(PATIENCE_S) == -signal.SIGKILL
    name = f"{PREFIX}{killed.pid}-"
    assert name in namespaces()
    remove_abandoned()
    assert name not in namespaces()


def namespaces() -> str:
    return subprocess.check_output(["ip", "netns", "list"], text=True)
