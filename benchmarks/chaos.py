"""Faults of every kind amid streams of every kind: no client may see any of them.

    make chaos                                          the table, and 1,000 faults at 200 streams
    make chaos ARGS='--faults 50 --streams 24'          a short form of it
    make chaos ARGS='--device cuda --faults 20 --streams 32 --numbers 48 --minutes 3'
                                                        two computes on one GPU
    make chaos ARGS='--device cuda --set tensor_parallel_size=2 --faults 20 --streams 32'
                                                        two computes on two GPUs each

First every answer is taken without a fault. Then each kind of fault comes once, with one and with
two replicas of each service, and then faults at random moments on random targets. Every answer must
be, byte for byte, what it was without: on the virtual device, in float32, and on a GPU with
`batch_invariant`. At the end all tables and pages are empty, and no process is left.

A request that loses two computes, or four workers, with fewer than 64 tokens between each and the
one before is taken for poison and fails. The run knows that rule and keeps to it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.chaos_hosts import HostsRing
from benchmarks.chaos_requests import KINDS, prepare_folder
from benchmarks.chaos_ring import (
    DOWN,
    DROP,
    KILL,
    STOP,
    TERM,
    WORKERS,
    Ring,
    StackRing,
    Strike,
    left_of,
    num_retries,
    unexpected_errors,
)
from benchmarks.chaos_run import ChaosError, Load, RandomRun, Tally, strike_once
from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.gpu_page import name_of_device
from benchmarks.gpu_server import wait_clean
from benchmarks.hosts import Hosts, why_not
from benchmarks.report import RESULTS, Report
from benchmarks.stack import Stack, descendants_of, scratch_folder

BY_NAME_ONLY = True  # it takes over an hour
MODEL = "chaos"
TOKENS = {"sim": 120, "cpu": 60, "cuda": 400}  # of each answer: two seconds or three
SIM_STEP_S = 0.02
MAX_MODEL_LEN = 8192  # of the requests, the longest prompt takes 5,000
KV_TOKENS = 300_000  # of each of two computes that share a GPU
HOLD_S = 120.0  # as a machine of two cores that is busy may take that long to start a service
CLEAN_WITHIN_S = 60.0
BROKEN = ("RemoteDisconnected", "IncompleteRead", "ConnectionReset", "broke off", "no JSON")
CHILDREN = ("mask process", "pool process", "parser")
COLUMNS = (
    "fault", "requests", "success", "failures", "lost", "doubled", "altered",
    "added latency, s", "recovery, s",
)  # fmt: skip


@dataclass(slots=True)
class Chaos:
    """One call: what it was asked for, and what it found."""

    arguments: argparse.Namespace
    report: Report
    failed: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{time.monotonic() - self.began_s:6.1f} s] {text}", flush=True)

    def note(self, what: str, problems: Sequence[str]) -> None:
        """Note whether something is as it should be."""
        self.failed += [f"{what}: {problem}" for problem in problems]
        shown = "; ".join(problems[:5]) or "yes"
        self.say(f"{what}: {shown}")
        self.checks.append(f"- {what}: {shown}")

    def end_section(self) -> None:
        """Put the checks so far on the page."""
        self.report.text("\n".join(self.checks))
        self.checks.clear()

    def settings(self) -> dict[str, object]:
        """Return the settings of a server."""
        arguments = self.arguments
        settings: dict[str, object] = {
            "router.hold_s": HOLD_S,
            "compute.max_model_len": MAX_MODEL_LEN,
            "compute.sim_step_base_s": SIM_STEP_S,
        }
        if arguments.device != "sim":
            settings |= {"compute.load_format": "dummy", "compute.batch_invariant": True}
            settings["compute.dtype"] = arguments.dtype
        if arguments.device == "cuda":
            settings["compute.max_batched_token_mem"] = KV_TOKENS
        return settings | {f"compute.{name}": value for name, value in arguments.set}

    def hosts(self, folder: Path, replicas: int) -> Hosts:
        """Start a ring on hosts: a router, and two with workers that can be cut off."""
        workers = [[f"{name}-{number}" for name in WORKERS] for number in range(2)]
        if replicas == 1:
            workers = [["tokenizer-0", "detokenizer-0"], ["compute-0"]]
        layout = {"router": ["router-0"], "one": workers[0], "two": workers[1]}
        settings = {**self.settings(), "compute.device": self.arguments.device}
        hosts = Hosts(folder, layout, settings)
        self.say(f"ready: {', '.join(f'{host}: {names}' for host, names in layout.items())}")
        return hosts

    def stack(self, folder: Path, replicas: int, routers: int = 1) -> Stack:
        """Start a server."""
        counts = [f"--{name}s={replicas}" for name in WORKERS]
        options = ("--device", self.arguments.device, f"--routers={routers}", *counts)
        stack = Stack(folder, *options, settings=self.settings()).wait_ready(600.0)
        self.say(f"ready: {stack.command.replace(str(folder), folder.name)}")
        return stack


def end_stack(chaos: Chaos, stack: Stack, num_routers: int = 1) -> None:
    """Check that nothing is left of the requests, end the server, and look for what it left."""
    left = wait_clean(stack, num_routers, CLEAN_WITHIN_S)
    chaos.note("every table empty and every page free", left)
    processes = descendants_of(stack.process.pid)
    status = stack.stop()
    gone = left_of(processes) + [f"status {status}"] * bool(status)
    chaos.note("it ended well, and no process is left", gone)
    chaos.note("no error was logged but for what was struck", unexpected_errors(stack))
    chaos.end_section()


def cells(what: str, tally: Tally, recovery: str) -> list[object]:
    """Lay out a row of a table."""
    differs = tally.difference
    good = tally.num_asked - tally.num_failed
    counts = (differs.num_lost, differs.num_doubled, differs.num_altered)
    return [what, tally.num_asked, good, tally.num_failed, *counts, tally.added_s, recovery]


def fault_table(chaos: Chaos, load: Load, faults: Sequence[tuple[str, str]], size: int) -> None:
    """Strike each kind of target in each way, and put what came of it in a table."""
    rows = [cells("none", load.repeat(size), "")]
    for kind, fault in faults:
        targets = [target for target in load.ring.targets() if target.kind == kind]
        if not targets:
            chaos.note(f"there is a {kind}", ["there is none"])
            continue
        row = strike_once(load, targets[len(rows) % len(targets)], fault, size)
        rows.append(cells(f"{fault} of a {kind}", row.tally, f"{row.strike.recovery_s:.1f}"))
        chaos.say(" | ".join(map(str, rows[-1])))
        _note_problems(chaos, f"{fault} of a {kind}", row.tally)
    chaos.report.table(COLUMNS, rows)


def _note_problems(chaos: Chaos, what: str, tally: Tally) -> None:
    chaos.failed += [f"{what}: {problem}" for problem in tally.problems]


def signal_faults(children: Sequence[str]) -> list[tuple[str, str]]:
    """Return what befalls one `slipstream serve`, in an order that lets each service rest."""
    faults = [(kind, fault) for fault in (KILL, STOP) for kind in (*WORKERS, *children)]
    return faults + [(kind, TERM) for kind in (*WORKERS, "router")]


def kill_router(chaos: Chaos, load: Load, size: int) -> None:
    """Kill one router of two: that breaks its own clients' connections, and nothing else."""
    (target, *_) = [target for target in load.ring.targets() if target.kind == "router"]
    tally = strike_once(load, target, KILL, size).tally
    others = [each for each in tally.problems if not any(name in each for name in BROKEN)]
    chaos.report.text(
        f"SIGKILL of a router of two broke the connections of {tally.num_failed} of "
        f"{tally.num_asked} requests, those that it had; the others went on at its sibling."
    )
    chaos.note("the clients of the other router saw nothing of it", others)


def strike_in_turn(chaos: Chaos, folder: Path, replicas: int) -> None:
    """Each fault once, with so many replicas."""
    what = f"{replicas} of each service" if replicas > 1 else "one of each service"
    chaos.report.text(f"## Each fault once, {what}")
    stack = chaos.stack(folder, replicas, replicas)
    try:
        load = Load(StackRing(stack), KINDS, TOKENS[chaos.arguments.device], MODEL)
        load.learn(2 * len(KINDS))
        is_split = "tensor_parallel_size" in dict(chaos.arguments.set)
        faults = signal_faults((*CHILDREN, *["follower"] * is_split))
        fault_table(chaos, load, faults, 2 * len(KINDS))
        if replicas > 1:
            kill_router(chaos, load, 2 * len(KINDS))
        end_stack(chaos, stack, replicas)
    finally:
        stack.close()


def strike_hosts(chaos: Chaos, folder: Path, replicas: int) -> None:
    """Each fault of the network once, with so many replicas on hosts of their own."""
    arguments = chaos.arguments
    what = f"{replicas} of each service" if replicas > 1 else "one of each service"
    chaos.report.text(f"## Hosts that are cut off, {what}")
    cuts_s = (5.0,)
    with chaos.hosts(folder, replicas) as hosts:
        load = Load(HostsRing(hosts, cuts_s), KINDS, TOKENS[arguments.device], MODEL)
        load.learn(2 * len(KINDS))
        rows = [cells("none", load.repeat(2 * len(KINDS)), "")]
        cuts = [
            (load.ring.host(host), fault)
            for host in hosts.network.addresses
            for fault in (DROP, DOWN)
        ]
        for target, fault in cuts:
            row = strike_once(load, target, fault, 2 * len(KINDS))
            name = f"{fault} of the host with {', '.join(target.services) or 'the router'}"
            rows.append(cells(name, row.tally, f"{row.strike.recovery_s:.1f}"))
            chaos.say(" | ".join(map(str, rows[-1])))
            _note_problems(chaos, name, row.tally)
        chaos.report.table(COLUMNS, rows)
        chaos.report.text(
            f"Each cut lasts {cuts_s[0]:g} s, and longer than a lease; the recovery is counted "
            "from its heal. With one replica the streams wait for the heal."
        )
        end_hosts(chaos, hosts)


def end_hosts(chaos: Chaos, hosts: Hosts) -> None:
    """Check that nothing is left of the requests, end the ring, and look for what it left."""
    chaos.note("every table empty and every page free", wait_clean(hosts, 1, CLEAN_WITHIN_S))
    errors = unexpected_errors(hosts)
    processes = [pid for each in hosts.instances.values() for pid in (each.pid,) if pid]
    processes += [child for pid in processes for child in descendants_of(pid)]
    hosts.close()
    chaos.note("no process and no network is left", [*left_of(processes), *hosts.network.left()])
    chaos.note("no error was logged but for what was struck", errors)
    chaos.end_section()


def strike_at_random(chaos: Chaos, folder: Path) -> None:
    """Faults at random moments on random targets, amid many streams."""
    arguments = chaos.arguments
    num_cut = arguments.faults // 2 if arguments.hosts else 0
    stack = chaos.stack(folder, 2)
    try:
        run = random_run(chaos, StackRing(stack), arguments.faults - num_cut)
        report_random(chaos, "one server", run, num_retries(stack))
        end_stack(chaos, stack)
    finally:
        stack.close()
    if num_cut:
        with chaos.hosts(folder, 2) as hosts:
            run = random_run(chaos, HostsRing(hosts), num_cut)
            report_random(chaos, "hosts of their own", run, num_retries(hosts))
            end_hosts(chaos, hosts)


def random_run(chaos: Chaos, ring: Ring, num_faults: int) -> RandomRun:
    """Strike a ring at random as often as that, or as long as there is time."""
    arguments = chaos.arguments
    load = Load(ring, KINDS, TOKENS[arguments.device], MODEL)
    load.learn(arguments.numbers)
    run = RandomRun(load, arguments.streams, arguments.seed, arguments.interval)
    share = num_faults / arguments.faults
    run.run(num_faults, time.monotonic() + 60.0 * share * arguments.minutes, chaos.say)
    return run


def report_random(chaos: Chaos, where: str, run: RandomRun, num_retried: int) -> None:
    """Put a random run on the page."""
    arguments = chaos.arguments
    chaos.report.text(
        f"## Faults at random moments on random targets of {where}: {arguments.streams} streams "
        f"at once, seed {arguments.seed}"
    )
    tally = run.tally
    chaos.report.table(COLUMNS, [cells(f"{len(run.strikes)} at random", tally, "")])
    by_fault: dict[tuple[str, str], list[Strike]] = {}
    for strike in run.strikes:
        by_fault.setdefault((strike.fault, strike.target.kind), []).append(strike)
    chaos.report.table(
        ("fault", "times", "median recovery, s", "longest, s"),
        [
            [
                f"{fault} of a {kind}",
                len(struck),
                median(each.recovery_s for each in struck),
                max(each.recovery_s for each in struck),
            ]
            for (fault, kind), struck in sorted(by_fault.items())
        ],
    )
    chaos.report.text(
        f"{len(run.strikes):,} faults in {run.wall_s / 60:.1f} minutes; of {tally.num_asked:,} "
        f"requests of {len(tally.kinds)} kinds, {run.num_hit:,} ran while something was struck, "
        f"and {num_retried:,} attempts were made after the first ones."
    )
    missing = run.num_faults - len(run.strikes)
    chaos.note("all faults came", [f"{missing} did not: no time"] if missing else [])
    chaos.note("no request failed, and no answer differs", tally.problems)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--faults", type=int, default=1000, help="at random; 0 leaves this part out")
    add("--streams", type=int, default=200, help="requests at once, of those at random")
    add("--minutes", type=float, default=180.0, help="the longest that those at random take")
    add("--interval", type=float, default=1.0, help="mean seconds between two of them")
    add("--seed", type=int, default=1)
    add("--replicas", type=int, nargs="*", default=None, help="of the table (default: 1 2)")
    add("--numbers", type=int, default=200, help="different requests of those at random")
    add("--device", default="sim", choices=("sim", "cpu", "cuda"))
    add("--model", choices=list(SHAPES), help="(default: llama-1b on cuda, else tiny)")
    add("--dtype", help="(default: bfloat16 on cuda, else float32)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        type=lambda pair: pair.split("=", 1),
        help="a [compute] setting",
    )
    add("--hosts", action=argparse.BooleanOptionalAction, default=True, help="cut off hosts, too")
    add("--out", type=Path, help="where the page goes (default: results/chaos*.md)")
    arguments = parser.parse_args(given)
    on_cuda = arguments.device == "cuda"
    arguments.model = arguments.model or ("llama-1b" if on_cuda else "tiny")
    arguments.dtype = arguments.dtype or ("bfloat16" if on_cuda else "float32")
    if arguments.replicas is None:
        arguments.replicas = [2] if on_cuda else [1, 2]
    arguments.hosts = arguments.hosts and arguments.device == "sim" and not why_not()
    name = "chaos" if arguments.device == "sim" else f"chaos_{arguments.device}"
    arguments.out = arguments.out or RESULTS / f"{name}.md"
    return arguments


def main() -> int:
    """Strike, and write the page; 1 if a client saw anything, or anything is left."""
    arguments = parse()
    report = Report("chaos", "Faults amid streams", "No client may see any of them.")
    report.text(
        f"- device: {name_of_device(arguments.device)}, model {arguments.model}\n"
        "- lost, doubled and altered: characters of texts, and entries of lists such as logprobs\n"
        "- added latency: the longest gap in a stream, less that in the same one without a fault\n"
        f"- hold_s is {HOLD_S:g}, as one replica is started again on a machine that is busy"
    )
    chaos = Chaos(arguments, report)
    if why_not():
        report.text(f"- no hosts were cut off: {why_not()}")
    with scratch_folder() as scratch:
        folder = prepare_folder(make_folder(scratch / MODEL, SHAPES[arguments.model]))
        try:
            for replicas in arguments.replicas:
                strike_in_turn(chaos, folder, replicas)
                if arguments.hosts:
                    strike_hosts(chaos, folder, replicas)
            if arguments.faults:
                strike_at_random(chaos, folder)
        except ChaosError as error:
            chaos.note("it came to its end", [str(error)])
    arguments.out.write_text(report.page)
    print("\n" + report.page)
    for problem in chaos.failed:
        print(f"FAILED {problem}")
    return 1 if chaos.failed else 0


if __name__ == "__main__":
    sys.exit(main())
