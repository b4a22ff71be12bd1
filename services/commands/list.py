"""`slipstream list`: the models that are downloaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from services.commands.command import Parser

DESCRIPTION = """\
List the models in the cache of the Hugging Face hub, their size on the disk,
when they were used, and whether they can be served."""


def add_options(parser: Parser) -> None:
    """Declare the form of the list."""
    parser.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Print the list."""
    from services.commands.hub_cache import age_text, cached_models, size_text, why_not_served

    models = [(model, why_not_served(model)) for model in cached_models()]
    if options.json:
        rows = [
            {
                "id": model.repo_id,
                "bytes": model.size_on_disk,
                "last_used": model.last_accessed,
                "path": str(model.repo_path),
                "served": not reason,
                "why_not": reason,
            }
            for model, reason in models
        ]
        print(json.dumps(rows, indent=2))
        return 0
    if not models:
        print("No model is downloaded. `slipstream pull Qwen/Qwen3-0.6B` fetches one, and the")
        print("demo model is always there: `slipstream chat`.")
        return 0
    width = max(len("MODEL"), *(len(model.repo_id) for model, _ in models))
    print(f"{'MODEL':<{width}}  {'SIZE':>8}  {'USED':<12}  SERVED")
    for model, reason in models:
        used = age_text(model.last_accessed)
        size = size_text(model.size_on_disk)
        served = f"no: {reason}" if reason else "yes"
        print(f"{model.repo_id:<{width}}  {size:>8}  {used:<12}  {served}")
    print(f"\n{size_text(sum(model.size_on_disk for model, _ in models))} in all")
    return 0
