"""A command of `slipstream`, and a parser that helps with mistyped options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from common.errors import near

API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"  # for commands that ask a server; it is no setting


class Command(NamedTuple):
    """One command; its module is imported for the options alone, so `run` imports what is heavy."""

    description: str
    run: Callable[[argparse.Namespace, Mapping[str, str]], int]
    add_options: Callable[[Parser], None] = lambda parser: None
    examples: str = ""
    hints: Mapping[str, str] = {}  # what replaces an option of another program

    def parser(self, name: str) -> Parser:
        parser = Parser(f"slipstream {name}", self.description, self.examples, self.hints)
        self.add_options(parser)
        return parser


def api_key_of(options: argparse.Namespace, env: Mapping[str, str]) -> str:
    return options.api_key or env.get(API_KEY_VARIABLE, "")


class Parser(argparse.ArgumentParser):
    """Answers a mistake in two lines, with a suggestion where there is one."""

    def __init__(
        self, prog: str, description: str, examples: str, hints: Mapping[str, str]
    ) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, examples or None, formatter_class=formatter)
        self.hints = hints

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Read the words after the command; ends the program at a mistake, with status 2."""
        options, unknown = self.parse_known_args([self._with_dashes(word) for word in words])
        if unknown:
            self.error(self._about(unknown[0]))
        return options

    def add_api_key(self) -> None:
        about = f"where the server needs one (default: ${API_KEY_VARIABLE})"
        self.add_argument("--api-key", metavar="KEY", help=about)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to read more."""
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")

    def _with_dashes(self, word: str) -> str:
        """An option may be written with underscores, as vLLM takes it."""
        option, equals, value = word.partition("=")
        dashed = option.replace("_", "-")
        return dashed + equals + value if dashed in self._option_string_actions else word

    def _about(self, word: str) -> str:
        option = word.partition("=")[0].replace("_", "-")
        if not option.startswith("-"):
            return f"{word}: one argument too many"
        if option in self.hints:
            return f"there is no {option} here; {self.hints[option]}"
        known = [name for action in self._actions for name in action.option_strings]
        return f"there is no option {option}{near(option, known)}"
