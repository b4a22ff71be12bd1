"""Numbers from 0 to 1000 turned into words, and words into numbers."""

from collections.abc import Iterator
from random import Random

from models.demo.training.conversation import Question, Turn, exactly
from models.demo.training.facts.numerals import LARGEST, in_words
from models.demo.training.wording import Wordings, capitalized

NAME = "number words"
WEIGHT = 0.1
REVERSED_SHARE = 0.35

ASK_WORDS = Wordings(
    trained=(
        "How do you write {number} in words?",
        "How do you write {number} in words?",
        "How do I write {number} in words?",
        "How is {number} written in words?",
        "How do you spell {number}?",
        "How is {number} spelled?",
        "How do you say {number} in words?",
        "How do you say {number} in English?",
        "Write {number} in words.",
        "Write {number} in letters.",
        "Write the number {number} in words.",
        "Write {number} as a word.",
        "Write out {number}.",
        "Spell {number}.",
        "Spell the number {number}.",
        "Spell out {number} in words.",
        "Say {number} in words.",
        "Say the number {number} in English words.",
        "What is {number} in words?",
        "What is {number} in letters?",
        "What is the number {number} in words?",
        "What is the word for {number}?",
        "What is {number} called in English?",
        "What word do you use for {number}?",
        "{number} in words?",
        "{number} in words, please.",
        "The number {number} in words?",
        "Tell me {number} in words.",
        "Tell me how to write {number} in words.",
        "Can you write {number} in words?",
        "Can you spell {number}?",
        "Can you spell the number {number} for me?",
        "Could you write the number {number} in words?",
        "Put {number} into words.",
        "Turn {number} into words.",
        "Give me {number} in words.",
        "Do you know how to write {number} in words?",
        "I need {number} in words.",
    ),
    held_out=(
        "Please write the number {number} in words.",
        "How would you write {number} in words?",
        "How is the number {number} written in English words?",
        "Can you put {number} into words?",
        "Spell out the number {number}.",
        "What is the number {number} called in words?",
        "Tell me the word for {number}.",
        "Turn the number {number} into words.",
        "Could you spell {number}?",
    ),
)
ASK_DIGITS = Wordings(
    trained=(
        "Write {words} in digits.",
        "Write {words} as a number.",
        "Write {words} in numbers.",
        "Write the number {words} in digits.",
        "How do you write {words} in digits?",
        "How do I write {words} as a number?",
        "How is {words} written in digits?",
        "What is {words} in digits?",
        "What is {words} as a number?",
        "What number is {words}?",
        "Which number is {words}?",
        "{words} in digits?",
        "{words} as a number?",
        "Turn {words} into digits.",
        "Give me {words} in digits.",
        "Tell me {words} in digits.",
        "Can you write {words} as a number?",
        "Can you turn {words} into a number?",
    ),
    held_out=(
        "Please write {words} in digits.",
        "How would you write {words} in digits?",
        "Which digits do I use for {words}?",
        "Turn {words} into a number.",
        "Can you write {words} in digits?",
        "Tell me what {words} is as a number.",
    ),
)


def words_answer(number: int) -> str:
    """Spell a number in a sentence."""
    return f"{number} in words is {in_words(number)}."


def digits_answer(number: int) -> str:
    """Write a spelled number in digits, in a sentence."""
    return f"{capitalized(in_words(number))} in digits is {number}."


def draw_number(rng: Random) -> int:
    """Draw a number, the small and the round ones more often."""
    roll = rng.random()
    if roll < 0.3:
        return rng.randrange(101)
    return rng.randrange(0, LARGEST + 1, 10) if roll < 0.37 else rng.randrange(LARGEST + 1)


def spelled(rng: Random, number: int) -> str:
    """Spell a number as people do: with 'and', or without the hyphen."""
    words = in_words(number)
    if rng.random() < 0.25:
        words = words.replace(" hundred ", " hundred and ")
    return words.replace("-", " ") if rng.random() < 0.2 else words


def words_turn(rng: Random) -> Turn:
    """Ask for a number in words, in a trained wording."""
    number = draw_number(rng)
    return Turn(ASK_WORDS.draw(rng, number=number), words_answer(number))


def digits_turn(rng: Random) -> Turn:
    """Ask for a spelled number in digits, in a trained wording."""
    number = draw_number(rng)
    asked = ASK_DIGITS.draw(rng, words=spelled(rng, number))
    return Turn(capitalized(asked) if rng.random() < 0.6 else asked, digits_answer(number))


def examples(rng: Random) -> Iterator[tuple[Turn, ...]]:
    """Yield single questions about number words."""
    while True:
        yield (digits_turn(rng) if rng.random() < REVERSED_SHARE else words_turn(rng),)


def questions(rng: Random) -> Iterator[Question]:
    """Yield held-out wordings over all numbers."""
    while True:
        number = draw_number(rng)
        if rng.random() < REVERSED_SHARE:
            asked = ASK_DIGITS.draw_held_out(rng, words=spelled(rng, number))
            yield exactly(asked, digits_answer(number))
        else:
            yield exactly(ASK_WORDS.draw_held_out(rng, number=number), words_answer(number))
