"""`slipstream timeline`: a trace of a running server's last seconds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from common.config import API_KEY_VARIABLE
from services.commands.command import Parser

DESCRIPTION = """\
Write what every process of a running server did in the last seconds as a trace
for Perfetto or Chrome: plan, launch, wait, commit and send of each step, the
device's steps and the gaps between them, and the text being made of them
meanwhile."""


def add_options(parser: Parser) -> None:
    """Declare which server is asked and where the trace goes."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="where its API is (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="how far back (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"where the API needs one (default: ${API_KEY_VARIABLE})"
    )
    parser.add_argument(
        "-o",
        "--output",
        default="trace.json",
        metavar="FILE",
        help="where to write it (default: %(default)s)",
    )


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Fetch the times, write the trace, print a summary."""
    import json

    from services.timeline import TimelineError, chrome_trace, fetch, summary

    api_key = options.api_key or env.get(API_KEY_VARIABLE, "")
    try:
        timeline = fetch(options.url, options.seconds, api_key)
        with open(options.output, "w", encoding="ascii") as file:
            json.dump(chrome_trace(timeline), file)
    except (TimelineError, OSError) as error:
        sys.stderr.write(f"slipstream timeline: {error}\n")
        return 1
    print("\n".join(summary(timeline)))
    print(f"{options.output}: open it at https://ui.perfetto.dev or in chrome://tracing")
    return 0
