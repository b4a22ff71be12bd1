"""The command `slipstream`: serve a model, ask for its health or a timeline, make keys.

Each command loads only what it needs: a health check runs every few seconds.
"""

from __future__ import annotations

import argparse
import os
import sys

from services.launcher.options import DESCRIPTION, EXAMPLES, add_serve_options, tables_of

INSTALLED_CONFIG = "/etc/slipstream/slipstream.toml"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    commands = {
        "serve": _serve,
        "health": _health,
        "timeline": _timeline,
        "keys": _keys,
        "version": _version,
    }
    return commands[options.command](options)


def _serve(options: argparse.Namespace) -> int:
    from common.errors import ConfigError, ModelError
    from services.launcher.launch import launch
    from services.launcher.plan import make_plan

    try:
        return launch(make_plan(options.config, os.environ, *tables_of(options)), os.environ)
    except (ConfigError, ModelError) as error:
        sys.stderr.write(f"slipstream serve: {error}\n")
        return 2
    except KeyboardInterrupt:  # during a download
        return 130


def _health(options: argparse.Namespace) -> int:
    from common.beacon import is_fresh

    run_dir = options.run_dir or _run_dir(options.config)
    if not run_dir:
        sys.stderr.write("slipstream health: no run_dir is known; give --run-dir or --config\n")
        return 2
    return 0 if is_fresh(run_dir, options.name) else 1


def _run_dir(config: str | None) -> str:
    """Find `[links] run_dir` as a service would, without loading what validates settings."""
    import tomllib

    if run_dir := os.environ.get("SLIPSTREAM_LINKS__RUN_DIR"):
        return run_dir
    path = config or os.environ.get("SLIPSTREAM_CONFIG") or INSTALLED_CONFIG
    try:
        with open(path, "rb") as file:
            return str(tomllib.load(file).get("links", {}).get("run_dir", ""))
    except (OSError, ValueError, AttributeError) as error:
        if config:
            sys.stderr.write(f"slipstream health: {path}: {error}\n")
        return ""


def _timeline(options: argparse.Namespace) -> int:
    import json

    from services.timeline import TimelineError, chrome_trace, fetch, summary

    try:
        timeline = fetch(options.url, options.seconds, options.api_key)
        with open(options.output, "w", encoding="ascii") as file:
            json.dump(chrome_trace(timeline), file)
    except (TimelineError, OSError) as error:
        sys.stderr.write(f"slipstream timeline: {error}\n")
        return 1
    print("\n".join(summary(timeline)))
    print(f"{options.output}: open it at https://ui.perfetto.dev or in chrome://tracing")
    return 0


def _keys(options: argparse.Namespace) -> int:
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


def _version(options: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"slipstream {version('slipstream')}")
    except PackageNotFoundError:
        print("slipstream (not installed)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description="An LLM server in which the GPU never waits for the CPU.",
        epilog="`slipstream COMMAND --help` says more; begin with `slipstream serve`.",
    )
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    add_serve_options(
        commands.add_parser(
            "serve",
            help="serve a model over HTTP",
            description=DESCRIPTION,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    health = commands.add_parser(
        "health",
        help="exit with 0 if a service of this host is ready, with 1 if not",
        description="Exit with 0 if a service of this host is ready, with 1 if not.",
    )
    health.add_argument("name", metavar="NAME", help="its --name, such as compute or compute-0")
    health.add_argument("--run-dir", metavar="DIR", help="its [links] run_dir")
    health.add_argument(
        "--config",
        metavar="FILE",
        help=f"its settings (default: $SLIPSTREAM_CONFIG or {INSTALLED_CONFIG})",
    )
    timeline = commands.add_parser(
        "timeline",
        help="draw what the processes of a running server did in the last seconds",
        description="Write what every process of a running server did in the last seconds as a "
        "trace for Perfetto or Chrome: plan, launch, wait, commit and send of each step, the "
        "device's steps and the gaps between them, and the text being made of them meanwhile.",
    )
    timeline.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="where its API is (default: %(default)s)",
    )
    timeline.add_argument(
        "--seconds", type=float, default=5.0, help="how far back (default: %(default)s)"
    )
    timeline.add_argument("--api-key", default="", metavar="KEY", help="where the API needs one")
    timeline.add_argument(
        "-o",
        "--output",
        default="trace.json",
        metavar="FILE",
        help="where to write it (default: %(default)s)",
    )
    keys = commands.add_parser(
        "keys",
        help="make the keys for links between hosts",
        description="Make the keys of one deployment, for links that leave the host: copy the "
        "folder to every host and name it in [links] curve_dir. Existing keys are kept.",
    )
    keys.add_argument("folder", metavar="DIR", help="where to put them")
    commands.add_parser("version", help="print the version")
    return parser


if __name__ == "__main__":
    sys.exit(main())
