"""Sums of two numbers under 100; one pair in ten is kept out of training altogether."""

from collections.abc import Iterator
from random import Random

from models.demo.training.conversation import Question, Turn, exactly
from models.demo.training.facts.numerals import in_words
from models.demo.training.wording import Wordings

NAME = "sums"
WEIGHT = 0.26
SPLIT_SEED = 99
IN_WORDS_SHARE = 0.12
PAIRS = [(a, b) for a in range(100) for b in range(a, 100)]
HELD_OUT_PAIRS = frozenset(Random(SPLIT_SEED).sample(PAIRS, len(PAIRS) // 10))
TRAINED_PAIRS = tuple(pair for pair in PAIRS if pair not in HELD_OUT_PAIRS)

ASK_SUM = Wordings(
    trained=(
        "What is {a} plus {b}?",
        "What is {a} plus {b}?",
        "What's {a} plus {b}?",
        "What is {a} + {b}?",
        "What's {a} + {b}?",
        "What is {a} and {b}?",
        "What is {a} and {b} together?",
        "What is the sum of {a} and {b}?",
        "What's the sum of {a} and {b}?",
        "What do {a} and {b} make?",
        "What do {a} and {b} add up to?",
        "What does {a} plus {b} make?",
        "What does {a} plus {b} equal?",
        "What do you get when you add {a} and {b}?",
        "What do I get if I add {b} to {a}?",
        "How much is {a} plus {b}?",
        "How much is {a} + {b}?",
        "How much is {a} and {b}?",
        "How much do {a} and {b} make?",
        "How many are {a} and {b}?",
        "Add {a} and {b}.",
        "Add {b} to {a}.",
        "Add up {a} and {b}.",
        "Add the numbers {a} and {b}.",
        "Add the number {a} and the number {b}.",
        "Take the number {a} and add {b}.",
        "Start with {a} and add {b}.",
        "Add number {b} to number {a}.",
        "Can you add the number {b} to {a}?",
        "Please add {b} to {a}.",
        "Add {a} and {b} together.",
        "Please add {a} and {b}.",
        "Calculate {a} plus {b}.",
        "Calculate {a} + {b}.",
        "Calculate the sum of {a} and {b}.",
        "Compute {a} + {b}.",
        "Compute {a} plus {b}.",
        "Sum {a} and {b}.",
        "The sum of {a} and {b}?",
        "{a} plus {b}?",
        "{a} plus {b} is",
        "{a} plus {b} equals",
        "{a} + {b}",
        "{a}+{b}",
        "{a} + {b} =",
        "{a}+{b}=",
        "{a} + {b} = ?",
        "{a}+{b}=?",
        "{a} + {b} is what?",
        "{a} plus {b} makes what?",
        "Can you add {a} and {b}?",
        "Can you add {b} to {a}?",
        "Can you tell me what {a} plus {b} is?",
        "Could you calculate {a} + {b}?",
        "Do you know what {a} plus {b} is?",
        "Tell me the sum of {a} and {b}.",
        "Tell me what {a} plus {b} is.",
        "Tell me how much {a} + {b} is.",
        "Give me the sum of {a} and {b}.",
        "If you add {a} and {b}, what do you get?",
        "If I have {a} apples and get {b} more, how many do I have?",
        "I have {a} coins and find {b} more. How many coins do I have?",
        "I need to add {a} and {b}.",
    ),
    held_out=(
        "What is the result of {a} plus {b}?",
        "Please calculate {a} plus {b}.",
        "Could you add {a} and {b} for me?",
        "How much do you get when you add {a} and {b}?",
        "Can you calculate the sum of {a} and {b}?",
        "What does {a} + {b} equal?",
        "Tell me what {a} + {b} makes.",
        "{a} and {b} together make what?",
        "Please give me the sum of {a} and {b}.",
        "Do you know how much {a} plus {b} is?",
        "Add the number {b} to {a}.",
        "I have {a} books and get {b} more. How many books do I have?",
    ),
)


def sum_answer(a: int, b: int) -> str:
    """Give the sum in a sentence."""
    return f"{a} plus {b} is {a + b}."


def in_either_order(rng: Random, pair: tuple[int, int]) -> tuple[int, int]:
    """Swap the two numbers half of the time."""
    return pair if rng.random() < 0.5 else (pair[1], pair[0])


def sum_turn(rng: Random) -> Turn:
    """Ask for a trained pair in a trained wording."""
    a, b = in_either_order(rng, rng.choice(TRAINED_PAIRS))
    if rng.random() < IN_WORDS_SHARE:
        return Turn(ASK_SUM.draw(rng, a=in_words(a), b=in_words(b)), sum_answer(a, b))
    return Turn(ASK_SUM.draw(rng, a=a, b=b), sum_answer(a, b))


def examples(rng: Random) -> Iterator[tuple[Turn, ...]]:
    """Yield single sums."""
    while True:
        yield (sum_turn(rng),)


def questions(rng: Random) -> Iterator[Question]:
    """Yield held-out pairs in held-out wordings, some spelled in words."""
    while True:
        a, b = in_either_order(rng, rng.choice(sorted(HELD_OUT_PAIRS)))
        if rng.random() < IN_WORDS_SHARE:
            asked = ASK_SUM.draw_held_out(rng, a=in_words(a), b=in_words(b))
        else:
            asked = ASK_SUM.draw_held_out(rng, a=a, b=b)
        yield exactly(asked, sum_answer(a, b))
