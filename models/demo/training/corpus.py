"""Mixes the skills into conversations to train on and questions to test with; knows no tokens."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

from models.demo.training.conversation import Conversation, Question, Turn
from models.demo.training.skills import SKILLS
from models.demo.training.wording import Wordings

TEST_SEED = 20_000_003
SYSTEM_SHARE = 0.3
SYSTEM = Wordings(
    trained=(
        "You are a helpful assistant.",
        "You are a helpful and friendly assistant.",
        "You are a friendly assistant. Answer briefly.",
        "You are an AI assistant.",
        "You are a small demo model.",
        "You are the Slipstream demo model.",
        "You are a teacher. Answer in full sentences.",
        "You are a polite chatbot that helps children learn.",
        "Answer the user's questions.",
        "Answer briefly and clearly.",
        "Answer in one sentence.",
        "Be concise.",
        "Be kind and honest.",
        "Be brief. If you do not know something, say so.",
        "Help the user with their questions.",
        "Always answer in English.",
        "Today is a nice day. Help the user.",
        "You answer questions about geography, chemistry and numbers.",
        "The user is a student. Explain things simply.",
        "Follow the instructions of the user.",
        "You are a chat model running on a server. Do not make things up.",
        "This is a test.",
    ),
    held_out=(
        "You are a kind assistant. Always answer the user's questions.",
        "You are a helpful chatbot. Be polite and brief.",
        "Answer the questions of the student in full sentences.",
        "You are an assistant that helps the user to learn.",
        "Please be honest and concise.",
    ),
)
MANY_TURNS = 24


class Mixture:
    """Draws turns from all skills by their weights, from one source of chance."""

    def __init__(self, rng: Random) -> None:
        """Open the endless stream of every skill."""
        self._rng = rng
        self._streams = [skill.examples(rng) for skill in SKILLS]
        self._weights = [skill.WEIGHT for skill in SKILLS]

    def turns(self, num_parts: int) -> tuple[Turn, ...]:
        """Put a number of independent examples one after the other."""
        streams = self._rng.choices(self._streams, self._weights, k=num_parts)
        return tuple(turn for stream in streams for turn in next(stream))

    def conversation(self, num_parts: int) -> Conversation:
        """Put examples together and, at times, a system prompt before them."""
        system = SYSTEM.draw(self._rng) if self._rng.random() < SYSTEM_SHARE else None
        return Conversation(self.turns(num_parts), system)


def conversations(seed: int) -> Iterator[Conversation]:
    """Yield endless short conversations, most of one or two turns."""
    rng = Random(seed)
    mixture = Mixture(rng)
    while True:
        yield mixture.conversation(rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4)))


def long_conversations(seed: int) -> Iterator[Conversation]:
    """Yield endless conversations of many turns, for positions far from the start."""
    rng = Random(seed)
    mixture = Mixture(rng)
    while True:
        yield mixture.conversation(rng.randrange(8, 3 * MANY_TURNS))


def held_out_questions(scale: float = 1.0) -> dict[str, list[Question]]:
    """Return the held-out questions by category, the same ones every time."""
    found: dict[str, list[Question]] = {}
    for number, skill in enumerate(SKILLS):
        size = max(1, round(scale * (60 if skill.NAME == "stories" else 250)))
        found[skill.NAME] = list(islice(skill.questions(Random(TEST_SEED + number)), size))
    found["later in a chat"] = list(islice(later_questions(1, 5), max(1, round(scale * 200))))
    found["late in a long chat"] = list(
        islice(later_questions(MANY_TURNS, MANY_TURNS + 8), max(1, round(scale * 50)))
    )
    return found


def later_questions(fewest: int, most: int) -> Iterator[Question]:
    """Yield held-out questions after other turns, half of them under a held-out system prompt."""
    rng = Random(TEST_SEED - most)
    mixture = Mixture(rng)
    streams = [skill.questions(rng) for skill in SKILLS]
    while True:
        question = next(rng.choice(streams))
        before = mixture.turns(rng.randrange(fewest, most))
        system = SYSTEM.draw_held_out(rng) if rng.random() < 0.5 else None
        yield replace(question, history=(*before, *question.history), system=system)
