"""`slipstream version`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from services.commands.command import Parser

DESCRIPTION = "Print the version."


def add_options(parser: Parser) -> None:
    """There are none."""


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Print the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"slipstream {version('slipstream')}")
    except PackageNotFoundError:
        print("slipstream (not installed)")
    return 0
