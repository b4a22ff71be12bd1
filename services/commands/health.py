"""`slipstream health`: whether a service of this host is ready, for supervisors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from services.commands.command import Parser

DESCRIPTION = "Exit with 0 if a service of this host is ready, with 1 if not."
INSTALLED_CONFIG = "/etc/slipstream/slipstream.toml"


def add_options(parser: Parser) -> None:
    """Declare which service is asked about and where it runs."""
    parser.add_argument("name", metavar="NAME", help="its --name, such as compute or compute-0")
    parser.add_argument("--run-dir", metavar="DIR", help="its [links] run_dir")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"its settings (default: $SLIPSTREAM_CONFIG or {INSTALLED_CONFIG})",
    )


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Look at the service's beacon."""
    from common.run_dir import is_fresh

    run_dir = options.run_dir or _run_dir(options.config, env)
    if not run_dir:
        sys.stderr.write("slipstream health: no run_dir is known; give --run-dir or --config\n")
        return 2
    return 0 if is_fresh(run_dir, options.name) else 1


def _run_dir(config: str | None, env: Mapping[str, str]) -> str:
    """Find `[links] run_dir` as a service would, without loading what validates settings."""
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
