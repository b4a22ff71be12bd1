"""Chemical symbols of the 118 elements, asked both ways round."""

from collections.abc import Iterator
from random import Random

from models.demo.training.conversation import Question, Turn, exactly
from models.demo.training.facts.chemistry import ALIASES, SYMBOLS
from models.demo.training.wording import Wordings

NAME = "chemical symbols"
WEIGHT = 0.12
REVERSED_SHARE = 0.35

ASK_SYMBOL = Wordings(
    trained=(
        "What is the chemical symbol for {element}?",
        "What is the chemical symbol for {element}?",
        "What is the chemical symbol of {element}?",
        "What's the chemical symbol for {element}?",
        "What is the symbol for {element}?",
        "What is the symbol of {element}?",
        "What's {element}'s symbol?",
        "What is {element}'s chemical symbol?",
        "Which symbol does {element} have?",
        "Which symbol stands for {element}?",
        "Which chemical symbol is used for {element}?",
        "What symbol is used for the element {element}?",
        "What is the symbol for the element {element}?",
        "How is {element} written in the periodic table?",
        "How do chemists write {element}?",
        "How do you write {element} in chemistry?",
        "How is {element} abbreviated in chemistry?",
        "In the periodic table, what is the symbol for {element}?",
        "In chemistry, what is the symbol of {element}?",
        "Tell me the chemical symbol for {element}.",
        "Tell me the symbol of {element}.",
        "Give me the symbol for {element}.",
        "Give me the chemical symbol of {element}.",
        "Name the chemical symbol for {element}.",
        "Name the symbol of the element {element}.",
        "Do you know the chemical symbol for {element}?",
        "Do you know the symbol for {element}?",
        "Can you tell me the symbol for {element}?",
        "Can you give me the chemical symbol of {element}?",
        "Could you tell me what the chemical symbol for {element} is?",
        "I need the chemical symbol of {element}.",
        "I want to know the symbol for {element}.",
        "Symbol for {element}?",
        "Chemical symbol of {element}?",
        "symbol {element}",
        "{element} symbol",
        "{element} chemical symbol",
        "What letters stand for {element}?",
        "The symbol of {element} is what?",
        "The chemical symbol for {element} is",
        "My question is about {element}: what is its symbol?",
        "What does the periodic table call {element}?",
    ),
    held_out=(
        "Which chemical symbol does {element} have?",
        "Please tell me the symbol for the element {element}.",
        "What is the symbol of the chemical element {element}?",
        "Could you give me the symbol for {element}?",
        "What symbol stands for {element} in the periodic table?",
        "I forgot the chemical symbol for {element}. What is it?",
        "Say what the symbol of {element} is.",
        "Chemical symbol for the element {element}?",
        "Which letters are the symbol for {element}?",
    ),
)
ASK_ELEMENT = Wordings(
    trained=(
        "Which element has the symbol {symbol}?",
        "What element has the symbol {symbol}?",
        "Which element has the chemical symbol {symbol}?",
        "Which chemical element is {symbol}?",
        "What element is {symbol}?",
        "Which element is written {symbol}?",
        "{symbol} is the symbol for which element?",
        "{symbol} is the chemical symbol of what?",
        "What does the chemical symbol {symbol} stand for?",
        "What does the symbol {symbol} mean in chemistry?",
        "In the periodic table, what is {symbol}?",
        "In chemistry, what does {symbol} stand for?",
        "The symbol {symbol} belongs to which element?",
        "Name the element with the symbol {symbol}.",
        "Tell me which element has the symbol {symbol}.",
        "Do you know which element {symbol} is?",
        "Can you name the element with the chemical symbol {symbol}?",
        "Element with the symbol {symbol}?",
    ),
    held_out=(
        "What is the element with the symbol {symbol}?",
        "Which element does {symbol} stand for?",
        "Tell me the element whose chemical symbol is {symbol}.",
        "What element does the symbol {symbol} belong to?",
        "Name the chemical element that is written {symbol}.",
    ),
)
ELEMENT_OF = {symbol: element for element, symbol in SYMBOLS.items()}
SPELLINGS = (*SYMBOLS, *ALIASES)


def symbol_answer(spelling: str) -> str:
    """Give the symbol of an element, repeating the name as it was spelled."""
    return f"The chemical symbol for {spelling} is {SYMBOLS[ALIASES.get(spelling, spelling)]}."


def element_answer(symbol: str) -> str:
    """Name the element of a symbol."""
    return f"{symbol} is the chemical symbol for {ELEMENT_OF[symbol]}."


def symbol_turn(rng: Random) -> Turn:
    """Ask for a symbol in a trained wording."""
    element = rng.choice(SPELLINGS)
    return Turn(ASK_SYMBOL.draw(rng, element=element), symbol_answer(element))


def element_turn(rng: Random) -> Turn:
    """Ask for the element of a symbol in a trained wording."""
    symbol = rng.choice(tuple(ELEMENT_OF))
    return Turn(ASK_ELEMENT.draw(rng, symbol=symbol), element_answer(symbol))


def examples(rng: Random) -> Iterator[tuple[Turn, ...]]:
    """Yield single questions about symbols."""
    while True:
        yield (element_turn(rng) if rng.random() < REVERSED_SHARE else symbol_turn(rng),)


def questions(rng: Random) -> Iterator[Question]:
    """Yield held-out wordings: every element in turn, a third of them by symbol."""
    while True:
        for element in rng.sample(SPELLINGS, len(SPELLINGS)):
            if rng.random() < REVERSED_SHARE:
                symbol = SYMBOLS[ALIASES.get(element, element)]
                asked = ASK_ELEMENT.draw_held_out(rng, symbol=symbol)
                yield exactly(asked, element_answer(symbol))
            else:
                asked = ASK_SYMBOL.draw_held_out(rng, element=element)
                yield exactly(asked, symbol_answer(element))
