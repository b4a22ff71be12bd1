"""`slipstream scale`: more or fewer processes of a service, while the server runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from services.commands.command import Command, Parser

DESCRIPTION = """\
Change how many processes of a service a running server has. New ones serve as
soon as they are ready; those that go take no more requests and finish what they
have. Without SERVICE=N the counts are only shown.
"""
EXAMPLES = """\
examples:
  slipstream scale compute=4
  slipstream scale tokenizer=2 detokenizer=2
"""


def add_options(parser: Parser) -> None:
    about = "router, tokenizer, compute or detokenizer, and how many there are to be"
    parser.add_argument("counts", nargs="*", metavar="SERVICE=N", type=service_count, help=about)
    folder = "the folder of the server's run (default: that of the only server of this user here)"
    parser.add_argument("--run-dir", metavar="DIR", help=folder)


def service_count(text: str) -> tuple[str, int]:
    from services.launcher.replicas import ScaleError, check_count, service_named

    name, separator, number = text.partition("=")
    if not separator or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: should be SERVICE=N, such as compute=2")
    try:
        service = service_named(name)
        check_count(service, int(number))
    except ScaleError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return service, int(number)


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from services.launcher.control import CONTROL_SOCKET, ask_control
    from services.launcher.replicas import ScaleError

    try:
        path = os.path.join(options.run_dir or _only_run_dir(CONTROL_SOCKET), CONTROL_SOCKET)
        before = ask_control(path, {})
        after = ask_control(path, dict(options.counts)) if options.counts else before
    except ScaleError as error:
        sys.stderr.write(f"slipstream scale: {error}\n")
        return 1
    for service, count in after.items():
        was = before.get(service, count)
        print(f"{service}: {count}" if count == was else f"{service}: {was} -> {count}")
    return 0


def _only_run_dir(socket: str) -> str:
    """Find the run of the only server here; ScaleError if there is none or more."""
    from common.run_dir import live_run_dirs
    from services.launcher.replicas import ScaleError

    found = [path for path in live_run_dirs() if os.path.exists(os.path.join(path, socket))]
    if not found:
        raise ScaleError(
            "no server of this user runs on this host; what runs in containers is scaled by its "
            "engine, such as docker compose up --scale compute=4"
        )
    if len(found) > 1:
        raise ScaleError(f"several servers run here; choose one with --run-dir: {', '.join(found)}")
    return found[0]


COMMANDS = {"scale": Command(DESCRIPTION, run, add_options, EXAMPLES)}
