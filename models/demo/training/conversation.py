"""The shapes every skill speaks in; knows no skill, tokenizer or model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing the user says and the model's answer to it."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole chat to train on."""

    turns: tuple[Turn, ...]
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return the chat as role and content pairs, in order."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            found.append({"role": "user", "content": turn.user})
            found.append({"role": "assistant", "content": turn.assistant})
        return found


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out question: what came before it, its text, and which answers are right."""

    text: str
    accepts: Callable[[str], bool]
    expected: str
    history: tuple[Turn, ...] = ()
    system: str | None = None
    num_tokens: range = range(1, 301)

    def messages(self) -> list[dict[str, str]]:
        """Return the chat up to and with the question."""
        before = Conversation(self.history, self.system).messages()
        return [*before, {"role": "user", "content": self.text}]


def exactly(text: str, answer: str, history: tuple[Turn, ...] = ()) -> Question:
    """Build a question that has one right answer, to the letter."""
    return Question(text, lambda given: given == answer, answer, history)


class Skill(Protocol):
    """One thing the model can do: endless examples to train on, endless questions to test with."""

    @property
    def NAME(self) -> str:
        """Name the category in the evaluation's table."""

    @property
    def WEIGHT(self) -> float:
        """Say how often the corpus draws this skill, relative to the others."""

    def examples(self, rng: Random) -> Iterator[tuple[Turn, ...]]:
        """Yield turns to train on, without end."""

    def questions(self, rng: Random) -> Iterator[Question]:
        """Yield held-out questions, without end."""
