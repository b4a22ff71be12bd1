"""The program `slipstream`: loads only the command that it runs, as health checks are frequent."""

from __future__ import annotations

import importlib
import os
import sys

from common.bytecode import keep_bytecode
from common.errors import near
from services.commands.command import Command

COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk with a model in the terminal",
    "complete": "let a model continue a text",
    "pull": "download a model from the Hugging Face hub",
    "list": "list the models that are downloaded",
    "rm": "remove a downloaded model",
    "scale": "change how many processes of a service a running server has",
    "bench": "measure a server under load",
    "timeline": "draw what the processes of a server did in the last seconds",
    "replay": "run a recording of the compute service again and compare",
    "stage": "run a stage of a model that several hosts share",
    "health": "exit with 0 if a service of this host is ready, with 1 if not",
    "keys": "make the keys for links between hosts",
    "version": "print the version",
}
# The modules of services/commands that hold several of them.
MODULES = {
    **dict.fromkeys(("chat", "complete"), "chat"),
    **dict.fromkeys(("pull", "list", "rm"), "models"),
    **dict.fromkeys(("health", "keys", "replay", "stage", "timeline", "version"), "operations"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return 0
    name = "version" if words[0] in ("-V", "--version") else words[0]
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        hint = near(name, list(COMMANDS))
        sys.stderr.write(f"slipstream: there is no {what} {name}{hint}\nSee `slipstream --help`.\n")
        return 2
    if name in ("serve", "stage"):
        keep_bytecode(os.environ)
    command = command_of(name)
    return command.run(command.parser(name).parse(words[1:]), os.environ)


def command_of(name: str) -> Command:
    module = importlib.import_module(f"services.commands.{MODULES.get(name, name)}")
    command: Command = module.COMMANDS[name]
    return command


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        (
            "An LLM server in which the GPU never waits for the CPU.",
            "",
            "usage: slipstream COMMAND [options]",
            "",
            *lines,
            "",
            "To begin:  slipstream chat     a conversation with the small demo model",
            "           slipstream serve    its API, on http://127.0.0.1:8000/v1",
            "`slipstream COMMAND --help` says more.",
            "",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
