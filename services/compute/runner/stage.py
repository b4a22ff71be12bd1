"""A stage of a pipeline: `python -m services.compute.runner.stage INBOX [--model DIR]`.

It waits at its inbox for the process that leads, and ends with it, to be started again by whoever
has started it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from common.child_main import die_with_parent
from common.config import LinkSettings
from services.compute.runner.registry import set_environment


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if options.inbox.startswith("ipc:"):  # a child's
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it like any other end, in silence
    set_environment()
    from services.compute.runner.stage_process import wait_at  # with torch

    protection = {"curve_dir": options.keys, "insecure": options.insecure}
    return wait_at(options.inbox, options.model, LinkSettings.model_validate(protection))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slipstream stage")
    parser.add_argument("inbox", help="where it waits, tcp://ADDRESS:PORT")
    parser.add_argument("--model", default="", help="the model's folder (default: the leader's)")
    parser.add_argument("--keys", default="", help="the deployment's keys, as in [links] curve_dir")
    parser.add_argument("--insecure", action="store_true", help="loopback may do without keys")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # without a word to other stages, which may be gone
