"""`slipstream serve`: a model over HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from services.commands.command import Parser
from services.launcher.options import (
    DESCRIPTION,
    EXAMPLES,
    INSTEAD,
    add_serve_options,
    tables_of,
)

__all__ = ["DESCRIPTION", "add_options", "run"]


def add_options(parser: Parser) -> None:
    """Declare the launcher's options."""
    parser.epilog = EXAMPLES
    parser.hints = INSTEAD
    add_serve_options(parser)


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Serve until told to end."""
    from common.errors import ConfigError, ModelError
    from services.launcher.launch import launch
    from services.launcher.plan import make_plan

    try:
        return launch(make_plan(options.config, env, *tables_of(options)), env)
    except (ConfigError, ModelError) as error:
        sys.stderr.write(f"slipstream serve: {error}\n")
        return 2
    except KeyboardInterrupt:  # during a download
        return 130
