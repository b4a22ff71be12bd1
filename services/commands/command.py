"""What a command of `slipstream` is made of, and a parser that helps with mistyped options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol, cast


class Command(Protocol):
    """A module of this package, named after its command; it imports what is heavy in `run`."""

    DESCRIPTION: str

    def add_options(self, parser: Parser) -> None:
        """Declare what may be typed after the command."""
        ...

    def run(self, options: argparse.Namespace, env: Mapping[str, str]) -> int:
        """Run the command; returns the exit status."""
        ...


class Parser(argparse.ArgumentParser):
    """Answers a mistake in two lines; `hints` say for foreign options what there is instead."""

    hints: Mapping[str, str] = {}

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Read the words after the command; ends the program at a mistake, with status 2."""
        options, unknown = self.parse_known_args(words)
        if unknown:
            self.error(self._about(unknown[0]))
        return options

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to read more."""
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")

    def _about(self, word: str) -> str:
        option = word.partition("=")[0]
        if not option.startswith("-"):
            return f"{word}: one argument too many"
        if option in self.hints:
            return f"there is no {option} here; {self.hints[option]}"
        known = [name for action in self._actions for name in action.option_strings]
        return f"there is no option {option}{near(option, known)}"


def near(word: str, known: Sequence[str]) -> str:
    """Return a suggestion to append to a complaint, empty where nothing is alike."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def parser_of(name: str, module: object) -> tuple[Parser, Command]:
    """Make the parser of a command, with its options."""
    command = cast(Command, module)
    parser = Parser(f"slipstream {name}", command.DESCRIPTION)
    command.add_options(parser)
    return parser, command
