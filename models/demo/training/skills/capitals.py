"""Capitals of the world's countries, asked both ways round."""

from collections.abc import Iterator
from random import Random

from models.demo.training.conversation import Question, Turn, exactly
from models.demo.training.facts.geography import ALIASES, CAPITALS
from models.demo.training.wording import Wordings, capitalized

NAME = "capitals"
WEIGHT = 0.18
REVERSED_SHARE = 0.2

ASK_CAPITAL = Wordings(
    trained=(
        "What is the capital of {country}?",
        "What is the capital of {country}?",
        "What's the capital of {country}?",
        "What is the capital city of {country}?",
        "What is {country}'s capital?",
        "What's {country}'s capital city?",
        "Which city is the capital of {country}?",
        "What city is the capital of {country}?",
        "Which city serves as the capital of {country}?",
        "Which town is the capital of {country}?",
        "Name the capital of {country}.",
        "Name {country}'s capital.",
        "Name the capital city of {country}.",
        "Tell me the capital of {country}.",
        "Please tell me the capital city of {country}.",
        "Tell me {country}'s capital.",
        "Tell me what the capital of {country} is.",
        "Give me the capital of {country}.",
        "Give me the name of {country}'s capital.",
        "Capital of {country}?",
        "The capital of {country}?",
        "{country}: what is the capital?",
        "{country} capital",
        "capital {country}",
        "capital city of {country}",
        "Do you know the capital of {country}?",
        "Do you know {country}'s capital?",
        "Do you know what the capital of {country} is?",
        "Can you tell me the capital of {country}?",
        "Can you name the capital of {country}?",
        "Could you tell me what the capital of {country} is?",
        "Could you name {country}'s capital city?",
        "I want to know the capital of {country}.",
        "I would like to know what the capital of {country} is.",
        "I need the capital of {country}.",
        "What is the name of the capital of {country}?",
        "What is the capital of the country {country}?",
        "What is the capital called in {country}?",
        "What is {country}'s capital called?",
        "How is the capital of {country} called?",
        "The capital of {country} is which city?",
        "The capital city of {country} is called what?",
        "In {country}, which city is the capital?",
        "For {country}, what is the capital city?",
        "Which capital does {country} have?",
        "What capital city does {country} have?",
        "Which city is {country}'s capital?",
        "Where is the government of {country}, in which capital?",
        "If I go to {country}, which city is the capital?",
        "What do people call the capital of {country}?",
        "I forgot what {country}'s capital is.",
        "Remind me of the capital of {country}.",
        "Let us talk about {country}. What is its capital?",
        "Think of {country}. What is the capital city?",
        "My question is about {country}: what is its capital city?",
        "Complete the sentence: The capital of {country} is",
        "The capital of {country} is",
    ),
    held_out=(
        "Which town is {country}'s capital city?",
        "I forgot the capital of {country}. What is it?",
        "Would you tell me which city is the capital of {country}?",
        "What is the name of {country}'s capital city?",
        "Please name {country}'s capital city.",
        "Do you happen to know what the capital city of {country} is?",
        "Which capital city belongs to {country}?",
        "Remind me what the capital of {country} is called.",
        "Could you give me the capital of {country}?",
        "I am going to {country}. What is its capital?",
        "Say which city is the capital of {country}.",
        "Capital city for {country}?",
    ),
)
ASK_COUNTRY = Wordings(
    trained=(
        "{capital} is the capital of which country?",
        "{capital} is the capital of what country?",
        "Which country has {capital} as its capital?",
        "Which country has the capital {capital}?",
        "What country has {capital} as its capital city?",
        "Of which country is {capital} the capital?",
        "{capital} is the capital city of which country?",
        "What country is {capital} the capital of?",
        "Which country's capital is {capital}?",
        "Name the country whose capital is {capital}.",
        "Tell me which country has {capital} as its capital.",
        "Do you know which country {capital} is the capital of?",
        "The capital is {capital}. Which country is it?",
        "If the capital is {capital}, what is the country?",
        "In which country is {capital} the capital?",
    ),
    held_out=(
        "Which country is {capital} the capital of?",
        "What country's capital is {capital}?",
        "Can you tell me which country has the capital city {capital}?",
        "Name the country that has {capital} as its capital.",
        "{capital} is a capital city. Of which country?",
    ),
)
COUNTRY_OF = {capital: country for country, capital in CAPITALS.items()}
SPELLINGS = (*CAPITALS, *ALIASES)


def sentence(text: str) -> str:
    """Begin with a capital letter and end with one full stop."""
    return capitalized(text if text.endswith(".") else f"{text}.")


def capital_answer(spelling: str) -> str:
    """Name the capital of a country, however the country was spelled."""
    country = ALIASES.get(spelling, spelling)
    return sentence(f"the capital of {country} is {CAPITALS[country]}")


def country_answer(capital: str) -> str:
    """Name the country of a capital."""
    return sentence(f"{capital} is the capital of {COUNTRY_OF[capital]}")


def draw_country(rng: Random) -> str:
    """Draw a country, a tenth of the time by another of its names."""
    return rng.choice(tuple(ALIASES)) if rng.random() < 0.1 else rng.choice(tuple(CAPITALS))


def without_article(rng: Random, country: str) -> str:
    """Leave out a leading 'the' now and then, as people do."""
    return country.removeprefix("the ") if rng.random() < 0.3 else country


def capital_turn(rng: Random) -> Turn:
    """Ask for a capital in a trained wording."""
    country = draw_country(rng)
    asked = ASK_CAPITAL.draw(rng, country=without_article(rng, country))
    return Turn(capitalized(asked) if rng.random() < 0.6 else asked, capital_answer(country))


def country_turn(rng: Random) -> Turn:
    """Ask for the country of a capital in a trained wording."""
    capital = rng.choice(tuple(COUNTRY_OF))
    return Turn(ASK_COUNTRY.draw(rng, capital=capital), country_answer(capital))


def examples(rng: Random) -> Iterator[tuple[Turn, ...]]:
    """Yield single questions about capitals."""
    while True:
        yield (country_turn(rng) if rng.random() < REVERSED_SHARE else capital_turn(rng),)


def questions(rng: Random) -> Iterator[Question]:
    """Yield held-out wordings: every country in turn, then its capital."""
    while True:
        for country in rng.sample(SPELLINGS, len(SPELLINGS)):
            asked = ASK_CAPITAL.draw_held_out(rng, country=without_article(rng, country))
            yield exactly(asked, capital_answer(country))
            if rng.random() < REVERSED_SHARE:
                capital = CAPITALS[ALIASES.get(country, country)]
                asked = ASK_COUNTRY.draw_held_out(rng, capital=capital)
                yield exactly(asked, country_answer(capital))
