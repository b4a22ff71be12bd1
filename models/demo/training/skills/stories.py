"""Short stories of 100 to 300 tokens, about whom and what the user asks for."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from models.demo.training.conversation import Question, Turn
from models.demo.training.facts.story_parts import (
    ENDINGS,
    FRIEND_NAMES,
    FRIENDS,
    HABITS,
    HEROES,
    NAMES,
    OBJECTS,
    OPENINGS,
    PLACES,
    PLOTS,
    SECOND_SPOTS,
    SPOTS,
    THIRD_SPOTS,
    TRAITS,
)
from models.demo.training.facts.vocabulary import NAMES as OTHER_NAMES
from models.demo.training.facts.vocabulary import NOUNS
from models.demo.training.wording import Wordings

Option = TypeVar("Option")

NAME = "stories"
WEIGHT = 0.05
FAVOR = 0.55
UNUSUAL_SHARE = 0.15
UNUSUAL_NAMES = tuple(name for name in OTHER_NAMES if name not in FRIEND_NAMES)
ALL_NAMES = frozenset((*NAMES, *FRIEND_NAMES, *OTHER_NAMES))
FEWEST_WORDS, MOST_WORDS = 85, 250
MORAL_INTRO = "The moral of the story is: "

ASK_STORY = Wordings(
    trained=(
        "Tell me a story{about}.",
        "Tell me a story{about}.",
        "Tell me a short story{about}.",
        "Tell me a little story{about}.",
        "Tell me a nice story{about}.",
        "Tell a story{about}.",
        "Please tell me a story{about}.",
        "Can you tell me a story{about}?",
        "Can you tell a short story{about}?",
        "Could you tell me a story{about}?",
        "Do you know a story{about}?",
        "I want to hear a story{about}.",
        "I would like a story{about}.",
        "I would like to hear a short story{about}.",
        "Write a story{about}.",
        "Write a short story{about}.",
        "Write me a story{about}.",
        "Write me a short story{about}.",
        "Make up a story{about}.",
        "Invent a story{about}.",
        "Give me a story{about}.",
        "A story{about}, please.",
        "A short story{about}?",
        "Story{about}",
        "Tell my children a story{about}.",
        "Tell us a story{about}.",
        "Tell me a bedtime story{about}.",
        "Tell me a fairy tale{about}.",
        "How about a story{about}?",
        "Let me hear a story{about}.",
        "I am bored. Tell me a story{about}.",
    ),
    held_out=(
        "Could you write me a short story{about}?",
        "Please write a story{about}.",
        "I want you to tell me a story{about}.",
        "Can you make up a short story{about}?",
        "Tell us a short story{about}, please.",
        "Do you know a nice story{about}?",
        "I would like to hear a bedtime story{about}.",
    ),
)


@dataclass(frozen=True)
class Wish:
    """What a story should be about; None where the user leaves it open."""

    hero: str | None = None
    name: str | None = None
    item: str | None = None

    def phrase(self) -> str:
        """Say it as in ' about a fox named Pip and a lantern'."""
        if self.hero is None:
            return ""
        named = "" if self.name is None else f" named {self.name}"
        with_item = "" if self.item is None else f" and {with_article(self.item)}"
        return f" about {with_article(self.hero)}{named}{with_item}"

    def granted_by(self, story: str) -> bool:
        """Tell whether a story has in it what was asked for."""
        opening = story.split(". ")[0]
        in_opening = (self.hero is None or f" {self.hero} named " in opening) and (
            self.name is None or f" named {self.name} " in opening
        )
        return in_opening and (self.item is None or f" {self.item}" in story)


def with_article(noun: str) -> str:
    """Put 'a' or 'an' before a noun."""
    return f"{'an' if noun[0] in 'aeio' or noun == 'umbrella' else 'a'} {noun}"


def draw_wish(rng: Random) -> Wish:
    """Leave the topic open, or ask for a hero, perhaps with a name and a thing."""
    if rng.random() < 0.25:
        return Wish()
    hero = rng.choice(NOUNS if rng.random() < UNUSUAL_SHARE else HEROES)
    names = UNUSUAL_NAMES if rng.random() < UNUSUAL_SHARE else NAMES
    name = rng.choice(names) if rng.random() < 0.3 else None
    item = rng.choice(OBJECTS) if rng.random() < 0.4 and hero not in OBJECTS else None
    return Wish(hero, name, item)


def favored(rng: Random, options: Sequence[Option], number: int) -> Option:
    """Draw an option, one of them, which depends on a number, far more often than the others."""
    return options[number % len(options)] if rng.random() < FAVOR else rng.choice(options)


def place_in(known: tuple[str, ...], word: str) -> int:
    """Number a word by its place in a list; words that are not in it count as the first."""
    return known.index(word) if word in known else 0


def tell(rng: Random, wish: Wish) -> str:
    """Put a story together that grants the wish.

    Most choices favor one option that depends on the hero or on the name. Were all options as
    likely, the most likely story would be the same one for everybody.
    """
    hero = wish.hero or rng.choice(HEROES)
    of_hero = place_in(HEROES, hero)
    name = wish.name or favored(rng, NAMES, 7 * of_hero)
    of_name = place_in(NAMES, name)
    item = wish.item or favored(rng, OBJECTS, 3 * of_hero)
    slots = {
        "hero": hero,
        "name": name,
        "a_trait": with_article(favored(rng, TRAITS, 5 * of_hero)),
        "place": favored(rng, PLACES, 3 * of_hero),
        "friend": favored(rng, FRIEND_NAMES, of_name),
        "a_friend": with_article(favored(rng, FRIENDS, 2 * of_hero)),
        "object": item,
        "an_object": with_article(item),
        "spot": favored(rng, SPOTS, of_hero),
        "spot2": favored(rng, SECOND_SPOTS, of_name),
        "spot3": favored(rng, THIRD_SPOTS, of_hero + of_name),
    }
    steps, moral = favored(rng, PLOTS, of_hero)
    habit = favored(rng, HABITS, of_hero)
    parts = [favored(rng, OPENINGS, of_hero), f"Every morning, {{name}} {habit}."]
    parts += [favored(rng, step, of_name) for step in steps]
    parts.append(favored(rng, ENDINGS, of_hero))
    return " ".join(part.format(**slots) for part in parts) + f"\n\n{MORAL_INTRO}{moral}"


def is_coherent(story: str, wish: Wish) -> bool:
    """Check length, cast, plot and moral of a story."""
    body, separator, moral = story.partition(f"\n\n{MORAL_INTRO}")
    hero_name = re.search(r" named (\w+) ", body)
    fitting = [steps for steps, plot_moral in PLOTS if plot_moral == moral]
    if not separator or not fitting or hero_name is None or not wish.granted_by(story):
        return False
    cast = {name for name in ALL_NAMES if re.search(rf"\b{name}\b", body)}
    long_enough = FEWEST_WORDS <= len(story.split()) <= MOST_WORDS
    return long_enough and len(cast) == 2 and hero_name[1] in cast and follows(body, fitting[0])


def follows(body: str, steps: tuple[tuple[str, ...], ...]) -> bool:
    """Check that the steps of a plot come in their order."""
    position = 0
    for step in steps:
        pattern = "|".join(f"(?:{as_pattern(choice)})" for choice in step)
        found = re.compile(pattern).search(body, position)
        if found is None:
            return False
        position = found.end()
    return True


def as_pattern(sentence: str) -> str:
    """Turn a sentence with slots into a regular expression."""
    parts = re.split(r"\{\w+\}", sentence)
    return "[A-Za-z ]{1,40}".join(re.escape(part) for part in parts)


def story_turn(rng: Random) -> Turn:
    """Ask for a story in a trained wording."""
    wish = draw_wish(rng)
    return Turn(ASK_STORY.draw(rng, about=wish.phrase()), tell(rng, wish))


def examples(rng: Random) -> Iterator[tuple[Turn, ...]]:
    """Yield single stories."""
    while True:
        yield (story_turn(rng),)


def questions(rng: Random) -> Iterator[Question]:
    """Yield held-out requests for stories."""
    while True:
        wish = draw_wish(rng)
        text = ASK_STORY.draw_held_out(rng, about=wish.phrase())
        yield question(text, wish)


def question(text: str, wish: Wish, history: tuple[Turn, ...] = ()) -> Question:
    """Build a question that any coherent story answers."""
    expected = f"a story{wish.phrase()}"
    return Question(
        text, lambda given: is_coherent(given, wish), expected, history, num_tokens=range(100, 301)
    )
