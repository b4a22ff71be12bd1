"""`slipstream pull`: a model is downloaded, for later or for a machine without a network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from services.commands.command import Parser

DESCRIPTION = """\
Download a model from the Hugging Face hub, or what is missing of it, into the
hub's cache. Only what is served is fetched: safetensors, no pickles, no code.
A gated model needs a token, by `hf auth login` or in HF_TOKEN."""


def add_options(parser: Parser) -> None:
    """Declare what is fetched."""
    parser.add_argument("model", metavar="MODEL", help="its id, such as Qwen/Qwen3-0.6B")
    parser.add_argument("--revision", default="", metavar="NAME", help="a branch, tag or commit")
    parser.add_argument(
        "--force", action="store_true", help="fetch the weights even of a model not served here"
    )


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Fetch the model, after a look at whether it can be served."""
    from common.decoder_shape import read_shape
    from common.errors import ModelError
    from common.model_folder import read_json
    from services.launcher.model import download, may_be_hub_id

    try:
        if not may_be_hub_id(options.model):
            raise ModelError(f"{options.model} is no id of a model; one looks like Qwen/Qwen3-0.6B")
        folder = download(options.model, options.revision, with_weights=False)
        if not options.force:
            read_shape(read_json(folder, "config.json", required=True))
        folder = download(options.model, options.revision, with_weights=True)
    except ModelError as error:
        sys.stderr.write(f"slipstream pull: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nWhat has come is kept; the same command goes on from there.\n")
        return 130
    print(folder)
    if sys.stdout.isatty():
        print(f"`slipstream chat {options.model}` talks with it.")
    return 0
