"""`slipstream complete`: a text that a model continues."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping

from services.commands.command import Command, Parser
from services.commands.server import (
    NoServer,
    ServerError,
    add_answer_options,
    add_target_options,
    answer_settings,
    open_target,
)

DESCRIPTION = """\
Let a model continue a text, given by -p or piped in, without a chat template.
Without MODEL or URL the server on this machine is asked, or one is started for
the small demo model and stopped at the end."""
EXAMPLES = """\
examples:
  slipstream complete -p 'Once upon a time'
  slipstream complete Qwen/Qwen3-0.6B --max-tokens 200 < beginning.txt
"""


def add_options(parser: Parser) -> None:
    add_target_options(parser)
    add_answer_options(parser)


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Print the continuation while it streams."""
    prompt = options.prompt
    if prompt is None:
        if sys.stdin.isatty():
            sys.stderr.write("Type the text; Ctrl-D on an empty line ends it.\n")
        prompt = sys.stdin.read()
    settings = {"max_tokens": 128, **answer_settings(options)}
    try:
        with open_target(options, env) as target:
            body = {"model": target.model, "prompt": prompt, **settings}
            with contextlib.closing(target.api.events("/v1/completions", body)) as events:
                for event in events:
                    for choice in event.get("choices") or []:
                        sys.stdout.write(choice.get("text") or "")
                        sys.stdout.flush()
        sys.stdout.write("\n")
    except ServerError as error:
        sys.stderr.write(f"slipstream complete: {error}\n")
        return 1
    except NoServer:
        return 2
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    return 0


COMMANDS = {"complete": Command(DESCRIPTION, run, add_options, EXAMPLES)}
