"""`slipstream keys`: the keys of links that leave the host."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from services.commands.command import Parser

DESCRIPTION = """\
Make the keys of one deployment, for links that leave the host: copy the folder
to every host and name it in [links] curve_dir. Existing keys are kept."""


def add_options(parser: Parser) -> None:
    """Declare where the keys go."""
    parser.add_argument("folder", metavar="DIR", help="where to put them")


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
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
