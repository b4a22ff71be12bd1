"""`slipstream health`, `keys`, `replay`, `stage`, `timeline` and `version`: for operators."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from services.commands.command import Command, Parser, api_key_of

HEALTH = "Exit with 0 if a service of this host is ready, with 1 if not."
KEYS = """\
Make the keys of one deployment, for links that leave the host: copy the folder
to every host and name it in [links] curve_dir. Existing keys are kept."""
REPLAY = """\
Run a recording again, in a process that has the model and no scheduler, and
compare every result with the recorded one, bit by bit. [compute] record_dir
makes recordings. After a crash of the device this shows whether the same step
fails again. Exits with 0 if all is equal, with 1 if not, and with 2 if it
cannot be replayed here."""
STAGE = """\
Run a stage of a model whose layers are split over several hosts. It waits at
its inbox for the compute service that leads, whose [compute] pipeline_stages
has the inboxes of all stages, and loads what this one says. It ends when that
one does, to be started again."""
TIMELINE = """\
Write what every process of a running server did in the last seconds as a trace
for Perfetto or Chrome: plan, launch, wait, commit and send of each step, the
device's steps and the gaps between them, and the text being made of them
meanwhile."""
VERSION = "Print the version."
SECOND_LOOK_S = 0.5  # a loop that turns ticks ten times a second
INSTALLED_CONFIG = "/etc/slipstream/slipstream.toml"


def add_health_options(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="its --name, such as compute or compute-0")
    parser.add_argument("--run-dir", metavar="DIR", help="its [links] run_dir")
    about = "kill it if it hangs, so that what supervises it, such as a container, starts it again"
    parser.add_argument("--kill", action="store_true", help=about)
    about = "exit with 0 also while it loads, drains or is ill: with 1 only if it hangs or is dead"
    parser.add_argument("--live", action="store_true", help=about)
    config = f"its settings (default: $SLIPSTREAM_CONFIG or {INSTALLED_CONFIG})"
    parser.add_argument("--config", metavar="FILE", help=config)


def health(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from common.beacon import read_beacon

    run_dir = options.run_dir or _run_dir(options.config, env)
    if not run_dir:
        sys.stderr.write("slipstream health: no run_dir is known; give --run-dir or --config\n")
        return 2
    beacon, now_s = read_beacon(run_dir, options.name), time.monotonic()
    if beacon is not None and beacon.hangs(now_s):  # or was paused, and has had no turn since
        time.sleep(SECOND_LOOK_S)
        beacon, now_s = read_beacon(run_dir, options.name), time.monotonic()
    if beacon is None:
        return 1
    if not beacon.hangs(now_s):
        return 0 if beacon.is_ready or options.live else 1
    silence_s = now_s - beacon.said_at_s
    sys.stderr.write(f"slipstream health: {options.name} hangs: silent for {silence_s:.1f} s\n")
    if options.kill and beacon.pid == 1:  # the kernel keeps that from whoever lives below it
        sys.stderr.write("slipstream health: process 1 cannot be killed; run it below an init\n")
    elif options.kill:
        with contextlib.suppress(ProcessLookupError):
            os.kill(beacon.pid, signal.SIGKILL)
    return 1


def _run_dir(config: str | None, env: Mapping[str, str]) -> str:
    """Find `[links] run_dir` as a service would, without loading pydantic."""
    import tomllib

    if run_dir := env.get("SLIPSTREAM_LINKS__RUN_DIR"):
        return run_dir
    path = config or env.get("SLIPSTREAM_CONFIG") or INSTALLED_CONFIG
    try:
        with open(path, "rb") as file:
            return str(tomllib.load(file).get("links", {}).get("run_dir", ""))
    except (OSError, ValueError, AttributeError) as error:
        if config:
            sys.stderr.write(f"slipstream health: {path}: {error}\n")
        return ""


def add_keys_options(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="where to put them")


def keys(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Make the keys, or check those that are there."""
    from common.errors import ConfigError
    from common.link.curve import SERVICES, create_keys, load_keys

    try:
        if os.path.isdir(options.folder) and os.listdir(options.folder):
            for service in SERVICES:
                load_keys(options.folder, service)
            print(f"{options.folder}: the keys are there already and stay as they are")
            return 0
        for path in create_keys(options.folder):
            print(path)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"slipstream keys: {error}\n")
        return 2
    return 0


def add_timeline_options(parser: Parser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="where its API is (default: %(default)s)")
    add("--seconds", type=float, default=5.0, help="how far back (default: %(default)s)")
    parser.add_api_key()
    output = "where to write it (default: %(default)s)"
    add("-o", "--output", default="trace.json", metavar="FILE", help=output)


def timeline(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from services.timeline import TimelineError, chrome_trace, expert_table, fetch, summary

    api_key = api_key_of(options, env)
    try:
        answer = fetch(options.url, options.seconds, api_key)
        with open(options.output, "w", encoding="ascii") as file:
            json.dump(chrome_trace(answer), file)
    except (TimelineError, OSError) as error:
        sys.stderr.write(f"slipstream timeline: {error}\n")
        return 1
    print("\n".join([*summary(answer), *expert_table(answer)]))
    print(f"{options.output}: open it at https://ui.perfetto.dev or in chrome://tracing")
    return 0


def add_replay_options(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="the recording")
    model = "the model's folder (default: where it was)"
    parser.add_argument("--model", metavar="DIR", help=model)


def replay(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    command = [sys.executable, "-m", "services.compute.runner.replay", options.file]
    return subprocess.run([*command, *([options.model] if options.model else [])]).returncode


def add_stage_options(parser: Parser) -> None:
    add = parser.add_argument
    add("inbox", metavar="INBOX", help="where it waits, as tcp://10.0.0.2:7100")
    add("--model", metavar="DIR", help="the model's folder (default: the leader's)")
    add("--keys", metavar="DIR", help="the deployment's keys, as in [links] curve_dir")
    insecure = "do without keys on loopback, as [links] insecure"
    add("--insecure", action="store_true", help=insecure)


def stage(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    command = [sys.executable, "-m", "services.compute.runner.stage", options.inbox]
    for name in ("model", "keys"):
        if value := getattr(options, name):
            command += [f"--{name}", value]
    command += ["--insecure"] * options.insecure
    os.execv(sys.executable, command)


def version(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    import importlib.metadata

    try:
        print(f"slipstream {importlib.metadata.version('slipstream')}")
    except importlib.metadata.PackageNotFoundError:
        print("slipstream (not installed)")
    return 0


COMMANDS = {
    "health": Command(HEALTH, health, add_health_options),
    "keys": Command(KEYS, keys, add_keys_options),
    "replay": Command(REPLAY, replay, add_replay_options),
    "stage": Command(STAGE, stage, add_stage_options),
    "timeline": Command(TIMELINE, timeline, add_timeline_options),
    "version": Command(VERSION, version),
}
