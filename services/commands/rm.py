"""`slipstream rm`: a downloaded model is removed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from services.commands.command import Parser, near

DESCRIPTION = """\
Remove models, in all their revisions, from the cache of the Hugging Face hub.
Other programs that use the cache do not find them any more either."""


def add_options(parser: Parser) -> None:
    """Declare what is removed."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="its id, as `list` shows it")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Remove the models, after a question on a terminal."""
    from services.commands.hub_cache import cached_models, size_text

    cached = {model.repo_id: model for model in cached_models()}
    for name in options.models:
        if name not in cached:
            hint = near(name, list(cached)) or "; `slipstream list` shows what is"
            sys.stderr.write(f"slipstream rm: {name} is not downloaded{hint}\n")
            return 1
    size = size_text(sum(cached[name].size_on_disk for name in options.models))
    if not options.yes:
        if not sys.stdin.isatty():
            sys.stderr.write("slipstream rm: nobody can be asked here; --yes removes\n")
            return 2
        try:
            answer = input(f"Remove {', '.join(options.models)} ({size})? [y/N] ")
        except (EOFError, KeyboardInterrupt):
            answer = ""
            print()
        if answer.strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 1
    from huggingface_hub import scan_cache_dir

    hashes = [each.commit_hash for name in options.models for each in cached[name].revisions]
    scan_cache_dir().delete_revisions(*hashes).execute()
    print(f"Removed; {size} are free again.")
    return 0
