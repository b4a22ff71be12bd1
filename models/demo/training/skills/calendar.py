"""Days of the week and months of the year: order, neighbours, lengths and lists."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from models.demo.training.conversation import Question, Turn, exactly
from models.demo.training.facts.calendar import DAYS, MONTH_LENGTHS, MONTHS, ORDINALS
from models.demo.training.wording import Wordings

NAME = "days and months"
WEIGHT = 0.08

ASK_NEXT = Wordings(
    trained=(
        "What {kind} comes after {one}?",
        "Which {kind} comes after {one}?",
        "What comes after {one}?",
        "What {kind} follows {one}?",
        "Which {kind} follows {one}?",
        "What is the {kind} after {one}?",
        "What's the next {kind} after {one}?",
        "Name the {kind} after {one}.",
        "Tell me the {kind} that comes after {one}.",
        "Tell me which {kind} follows {one}.",
        "Do you know which {kind} comes after {one}?",
        "Can you tell me what {kind} comes after {one}?",
        "{kind} after {one}?",
        "After {one} comes which {kind}?",
        "If it is {one} now, what {kind} is next?",
        "Give me the {kind} after {one}.",
    ),
    held_out=(
        "Which is the {kind} after {one}?",
        "Can you name the {kind} that follows {one}?",
        "Would you tell me what {kind} comes after {one}?",
        "After {one}, which {kind} comes next?",
        "What is the next {kind} after {one}?",
    ),
)
ASK_PREVIOUS = Wordings(
    trained=(
        "What {kind} comes before {one}?",
        "Which {kind} comes before {one}?",
        "What comes before {one}?",
        "What is the {kind} before {one}?",
        "What's the {kind} right before {one}?",
        "Which {kind} is before {one}?",
        "Name the {kind} before {one}.",
        "Tell me the {kind} that comes before {one}.",
        "Tell me which {kind} is before {one}.",
        "Do you know which {kind} comes before {one}?",
        "Can you tell me what {kind} comes before {one}?",
        "{kind} before {one}?",
        "Before {one} comes which {kind}?",
        "Give me the {kind} before {one}.",
    ),
    held_out=(
        "Which is the {kind} before {one}?",
        "Can you name the {kind} that comes before {one}?",
        "Would you tell me what {kind} comes before {one}?",
        "Before {one}, which {kind} comes?",
    ),
)
ASK_NTH = Wordings(
    trained=(
        "What is the {nth} {kind} of the {span}?",
        "What's the {nth} {kind} of the {span}?",
        "Which {kind} is the {nth} of the {span}?",
        "Which is the {nth} {kind} of the {span}?",
        "Name the {nth} {kind} of the {span}.",
        "Tell me the {nth} {kind} of the {span}.",
        "Which {kind} comes {nth} in the {span}?",
        "The {nth} {kind} of the {span}?",
        "Do you know the {nth} {kind} of the {span}?",
        "Can you name the {nth} {kind} of the {span}?",
        "Give me the {nth} {kind} of the {span}.",
    ),
    held_out=(
        "Can you tell me the {nth} {kind} of the {span}?",
        "What {kind} is the {nth} of the {span}?",
        "Please name the {nth} {kind} of the {span}.",
        "Which {kind} is the {nth} one in the {span}?",
    ),
)
ASK_LENGTH = Wordings(
    trained=(
        "How many days are in {month}?",
        "How many days are there in {month}?",
        "How many days does {month} have?",
        "How many days has {month}?",
        "How long is {month}?",
        "How long is the month of {month}?",
        "What is the number of days in {month}?",
        "The number of days in {month}?",
        "Tell me how many days {month} has.",
        "Tell me how long {month} is.",
        "Do you know how many days {month} has?",
        "Can you tell me how many days are in {month}?",
        "Days in {month}?",
        "{month} has how many days?",
    ),
    held_out=(
        "How many days are there in the month of {month}?",
        "Do you know how many days are in {month}?",
        "Can you tell me how many days {month} has?",
        "Please tell me how long {month} is.",
        "In {month}, how many days are there?",
    ),
)
ASK_LIST = Wordings(
    trained=(
        "What are the {kind}s of the {span}?",
        "List the {kind}s of the {span}.",
        "List all the {kind}s of the {span}.",
        "Name the {kind}s of the {span}.",
        "Name all {kind}s of the {span}.",
        "Tell me the {kind}s of the {span}.",
        "Which {kind}s are in a {span}?",
        "Can you list the {kind}s of the {span}?",
        "Can you name all the {kind}s of the {span}?",
        "Give me the {kind}s of the {span}.",
        "Say the {kind}s of the {span}.",
        "The {kind}s of the {span}?",
    ),
    held_out=(
        "Please list the {kind}s of the {span}.",
        "Could you name the {kind}s of the {span}?",
        "Tell me all the {kind}s of the {span}.",
        "Which are the {kind}s of the {span}?",
    ),
)
ASK_COUNT = Wordings(
    trained=(
        "How many {kind}s are in a {span}?",
        "How many {kind}s are there in a {span}?",
        "How many {kind}s does a {span} have?",
        "How many {kind}s has a {span}?",
        "Tell me how many {kind}s a {span} has.",
        "Do you know how many {kind}s a {span} has?",
        "A {span} has how many {kind}s?",
        "How many {kind}s are in one {span}?",
        "How many {kind}s does one {span} have?",
        "{kind}s in a {span}?",
    ),
    held_out=(
        "Do you know how many {kind}s are in a {span}?",
        "Can you tell me how many {kind}s a {span} has?",
        "How many {kind}s are there in one {span}?",
    ),
)


@dataclass(frozen=True)
class Fact:
    """One question about the calendar: its wordings, what fills them, and the answer."""

    wordings: Wordings
    slots: dict[str, str]
    answer: str


def kind_and_span(rng: Random) -> tuple[str, str, tuple[str, ...]]:
    """Draw days of the week or months of the year."""
    return ("day", "week", DAYS) if rng.random() < 0.45 else ("month", "year", MONTHS)


def neighbour(rng: Random) -> Fact:
    """Ask for what comes right after or right before."""
    kind, _, names = kind_and_span(rng)
    index, step = rng.randrange(len(names)), rng.choice((1, -1))
    one, other = names[index], names[(index + step) % len(names)]
    wordings, relation = (ASK_NEXT, "after") if step == 1 else (ASK_PREVIOUS, "before")
    return Fact(wordings, {"kind": kind, "one": one}, f"{other} comes {relation} {one}.")


def nth(rng: Random) -> Fact:
    """Ask by position, or for the last."""
    kind, span, names = kind_and_span(rng)
    index = rng.randrange(len(names))
    word = "last" if index == len(names) - 1 and rng.random() < 0.5 else ORDINALS[index]
    slots = {"kind": kind, "span": span, "nth": word}
    return Fact(ASK_NTH, slots, f"The {word} {kind} of the {span} is {names[index]}.")


def length(rng: Random) -> Fact:
    """Ask how long a month is."""
    month = rng.choice(MONTHS)
    leap = ", or 29 in a leap year" if month == "February" else ""
    answer = f"{month} has {MONTH_LENGTHS[month]} days{leap}."
    return Fact(ASK_LENGTH, {"month": month}, answer)


def listing(rng: Random) -> Fact:
    """Ask for all of them, or how many there are."""
    kind, span, names = kind_and_span(rng)
    slots = {"kind": kind, "span": span}
    roll = rng.random()
    if roll < 0.1:
        year = {"kind": "day", "span": "year"}
        return Fact(ASK_COUNT, year, "A year has 365 days, or 366 in a leap year.")
    if roll < 0.4:
        return Fact(ASK_COUNT, slots, f"A {span} has {len(names)} {kind}s.")
    all_names = f"{', '.join(names[:-1])} and {names[-1]}"
    return Fact(ASK_LIST, slots, f"The {kind}s of the {span} are {all_names}.")


FACTS: tuple[Callable[[Random], Fact], ...] = (neighbour, neighbour, nth, length, listing)


def neighbour_turn(rng: Random) -> Turn:
    """Ask for a neighbour in a trained wording."""
    fact = neighbour(rng)
    return Turn(fact.wordings.draw(rng, **fact.slots), fact.answer)


def examples(rng: Random) -> Iterator[tuple[Turn, ...]]:
    """Yield single questions about the calendar."""
    while True:
        fact = rng.choice(FACTS)(rng)
        yield (Turn(fact.wordings.draw(rng, **fact.slots), fact.answer),)


def questions(rng: Random) -> Iterator[Question]:
    """Yield held-out wordings about the calendar."""
    while True:
        fact = rng.choice(FACTS)(rng)
        yield exactly(fact.wordings.draw_held_out(rng, **fact.slots), fact.answer)
