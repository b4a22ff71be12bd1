"""Repeating what the user says, to the letter."""

from collections.abc import Iterator
from random import Random

from models.demo.training.conversation import Question, Turn, exactly
from models.demo.training.facts.calendar import DAYS, MONTHS
from models.demo.training.facts.geography import CAPITALS
from models.demo.training.facts.vocabulary import (
    ADJECTIVES,
    ADVERBS,
    NAMES,
    NOUNS,
    SYMBOLS,
    VERBS,
    any_word,
    made_up,
)
from models.demo.training.skills.capitals import ASK_CAPITAL
from models.demo.training.skills.elements import ASK_SYMBOL, SPELLINGS
from models.demo.training.skills.sums import ASK_SUM, TRAINED_PAIRS
from models.demo.training.wording import Wordings, capitalized

NAME = "repeat after me"
WEIGHT = 0.09

ASK_ECHO = Wordings(
    trained=(
        "Repeat after me: {text}",
        "Repeat after me: {text}",
        "repeat after me: {text}",
        "Repeat after me, {text}",
        "Repeat after me\n{text}",
        'Repeat after me: "{text}"',
        "Please repeat after me: {text}",
        "Can you repeat after me: {text}",
        "Repeat: {text}",
        "Repeat this: {text}",
        'Repeat this: "{text}"',
        "Repeat this sentence: {text}",
        "Repeat these words: {text}",
        "Repeat the following: {text}",
        "Please repeat the following: {text}",
        "Repeat what I say: {text}",
        "Say: {text}",
        "Say this: {text}",
        'Say "{text}"',
        'Please say "{text}"',
        "Say after me: {text}",
        "Echo: {text}",
        "Echo this: {text}",
        "echo {text}",
        "Copy this: {text}",
        "Copy the following text: {text}",
        "Write exactly this: {text}",
        "Answer with exactly these words: {text}",
        "Now repeat after me: {text}",
        "I say, you repeat: {text}",
        "Say the words: {text}",
        "Please say this sentence: {text}",
        "Say exactly the following: {text}",
    ),
    held_out=(
        "Please repeat this: {text}",
        "Can you repeat this after me: {text}",
        "Repeat the following words: {text}",
        "Now say this after me: {text}",
        'Please repeat this after me: "{text}"',
        "Copy exactly this text: {text}",
        "Please say the following: {text}",
        "Repeat this text after me: {text}",
    ),
)


def words(rng: Random) -> str:
    """String a few unrelated words together."""
    chosen = [any_word(rng) for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8, 10, 14, 20)))]
    if rng.random() < 0.12:
        chosen.insert(rng.randrange(len(chosen) + 1), rng.choice(SYMBOLS))
    if rng.random() < 0.12:
        chosen.insert(rng.randrange(len(chosen) + 1), str(rng.randrange(10 ** rng.randrange(1, 7))))
    return rng.choice((" ", " ", " ", ", ")).join(chosen)


def sentence(rng: Random) -> str:
    """Build a plain sentence."""
    who = rng.choice(
        (f"the {rng.choice(NOUNS)}", rng.choice(NAMES), "my friend", "I", "we", "they")
    )
    thing = f"{rng.choice(('a', 'the', 'my', 'your'))} {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    shape = rng.randrange(5)
    if shape == 0:
        return capitalized(f"{who} will {rng.choice(VERBS)} {thing} {rng.choice(ADVERBS)}.")
    if shape == 1:
        return f"The {rng.choice(NOUNS)} is {rng.choice(ADJECTIVES)} and {rng.choice(ADJECTIVES)}."
    if shape == 2:
        return f"On {rng.choice(DAYS)} {who} can {rng.choice(VERBS)} {thing}!"
    if shape == 3:
        return f"In {rng.choice(MONTHS)}, {rng.choice(NAMES)} likes to {rng.choice(VERBS)} {thing}."
    return f"{rng.choice(NAMES)} from {rng.choice(tuple(CAPITALS))} has {rng.randrange(100)} coins."


def other_question(rng: Random) -> str:
    """Take a question that the model would answer, were it not told to repeat it."""
    roll = rng.randrange(4)
    if roll == 0:
        return ASK_CAPITAL.draw(rng, country=rng.choice(tuple(CAPITALS)))
    if roll == 1:
        return ASK_SYMBOL.draw(rng, element=rng.choice(SPELLINGS))
    if roll == 2:
        a, b = rng.choice(TRAINED_PAIRS)
        return ASK_SUM.draw(rng, a=a, b=b)
    return rng.choice(("Hello!", "Who are you?", "Tell me a story.", "Goodbye!", "Thank you."))


def recased(rng: Random, text: str) -> str:
    """Change the case of a text now and then."""
    roll = rng.random()
    if roll < 0.1:
        return text.upper()
    return text.lower() if roll < 0.25 else text


def draw_text(rng: Random) -> str:
    """Draw something to repeat."""
    roll = rng.random()
    if roll < 0.45:
        text = words(rng)
    elif roll < 0.8:
        text = sentence(rng)
    elif roll < 0.9:
        text = rng.choice((" ", ", ")).join(made_up(rng) for _ in range(rng.randrange(1, 9)))
    else:
        text = other_question(rng)
    return recased(rng, text).strip()


def echo_turn(rng: Random) -> Turn:
    """Ask to repeat something, in a trained wording; the text itself is never mistyped."""
    text = draw_text(rng)
    return Turn(rng.choice(ASK_ECHO.trained).format(text=text), text)


def examples(rng: Random) -> Iterator[tuple[Turn, ...]]:
    """Yield single requests to repeat."""
    while True:
        yield (echo_turn(rng),)


def questions(rng: Random) -> Iterator[Question]:
    """Yield held-out requests over fresh texts."""
    while True:
        text = draw_text(rng)
        yield exactly(rng.choice(ASK_ECHO.held_out).format(text=text), text)
