"""The server that a command talks to: one that runs, or one that is started for the occasion."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from common.config import API_KEY_VARIABLE, DEMO_MODEL, LAUNCHER_FD_VARIABLE
from common.errors import EXIT_SIGNALLED
from services.commands.api import Api, ApiError
from services.commands.command import Parser

DEFAULT_URL = "http://127.0.0.1:8000"
READY_LINE = re.compile(r"Slipstream serves .* at (http://\S+)/v1 ")
STOP_WITHIN_S = 30.0


class NoServer(Exception):
    """There is no server to talk to; the text is empty where all has been said."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the name of the model to ask there."""

    api: Api
    model: str


def add_target_options(parser: Parser) -> None:
    """Declare whom to ask."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODEL|URL",
        help="a model, as for `slipstream serve`, for which a server is started and stopped "
        f"again; or the address of a server (default: {DEFAULT_URL} where one "
        "runs, else the demo model)",
    )
    parser.add_argument("--model", metavar="NAME", help="which model, where the server has several")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"where the server needs one (default: ${API_KEY_VARIABLE})",
    )


@contextlib.contextmanager
def open_target(options: argparse.Namespace, env: Mapping[str, str]) -> Iterator[Target]:
    """Find or start the server; NoServer says why there is none."""
    api_key = options.api_key or env.get(API_KEY_VARIABLE, "")
    target = options.target or ""
    if re.match(r"https?://", target):
        yield _chosen(Api(target, api_key), options.model)
        return
    running = Api(DEFAULT_URL, api_key)
    try:
        served = running.models()
    except ApiError as error:
        if error.status in (401, 403) and not target:  # any other is no server of this API
            raise
        served = []
    if served and (not target or target in served):
        yield _chosen(running, options.model or target)
        return
    api_key = api_key or env.get("SLIPSTREAM_ROUTER__API_KEYS", "").partition(",")[0].strip()
    with _started(target or DEMO_MODEL, env) as url:
        yield _chosen(Api(url, api_key), options.model)


def add_answer_options(parser: Parser) -> None:
    """Declare what is asked, and how it is to be answered."""
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="ask this and end")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always answers the same")
    parser.add_argument("--seed", type=int, metavar="N", help="of the dice")


def answer_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a request that were given as options."""
    given = {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
    return {name: value for name, value in given.items() if value is not None}


def _chosen(api: Api, model: str | None) -> Target:
    """Take the model that was named, or the first one; ApiError if it is not there."""
    served = api.models()
    if not served:
        raise ApiError(f"{api.url} serves no model")
    if model and model not in served:
        raise ApiError(f"{api.url} serves no {model}; it serves {', '.join(served)}")
    return Target(api, model or served[0])


@contextlib.contextmanager
def _started(model: str, env: Mapping[str, str]) -> Iterator[str]:
    """Serve a model on a free port for as long as the context lasts; gives the address.

    The server has a session of its own, so that Ctrl-C stops an answer and not the server. It
    writes warnings and its progress to the same terminal.
    """
    root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))
    sys.stderr.write(f"starting a server for {Path(model).name} ...\n")
    command = [sys.executable, "-m", "services.cli", "serve", model]
    for number in (signal.SIGTERM, signal.SIGHUP):  # it is not to be left behind
        signal.signal(number, _end)
    read_fd, write_fd = os.pipe()  # its writing end goes with us, which the server notices
    with subprocess.Popen(
        [*command, "--port", "0", "--log-level", "warning"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=(read_fd,),
        start_new_session=True,
        env={
            **env,
            "PYTHONPATH": search,
            "PYTHONSAFEPATH": "1",
            LAUNCHER_FD_VARIABLE: str(read_fd),
        },
        text=True,
    ) as server:
        os.close(read_fd)
        try:
            assert server.stdout is not None
            matches = map(READY_LINE.match, server.stdout)
            ready = next(filter(None, matches), None)
            if ready is None:
                raise NoServer
            yield ready[1]
        finally:
            _stop(server)
            os.close(write_fd)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_SIGNALLED + number)


def _stop(server: subprocess.Popen[str]) -> None:
    """Let the server end in order; at once if it takes long or Ctrl-C comes meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_WITHIN_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            server.send_signal(signal.SIGTERM)  # the second one cuts the drain short
            server.wait()
