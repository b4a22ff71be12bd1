"""Short stories of 100 to 300 tokens, about whom and what the user asks for."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from models.demo.training.conversation import Question, Turn
from models.demo.training.facts.story_parts import (
    ENDINGS,
    HEROES,
    HABITS,
    NAMES,
    OBJECTS,
    OPENINGS,
    PLACES,
    PLOTS,
    SPOTS,
    TRAITS,
)
from models.demo.training.wording import Wordings

NAME = "stories"
WEIGHT = 0.05
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
    name = rng.choice(NAMES) if rng.random() < 0.3 else None
    item = rng.choice(OBJECTS) if rng.random() < 0.4 else None
    return Wish(rng.choice(HEROES), name, item)


def tell(rng: Random, wish: Wish) -> str:
    """Put a story together that grants the wish."""
    hero = wish.hero or rng.choice(HEROES)
    friend_kind = rng.choice([other for other in HEROES if other != hero])
    name = wish.name or rng.choice(NAMES)
    item = wish.item or rng.choice(OBJECTS)
    spot, spot2, spot3 = rng.sample(SPOTS, 3)
    slots = {
        "hero": hero,
        "name": name,
        "a_trait": with_article(rng.choice(TRAITS)),
        "place": rng.choice(PLACES),
        "friend": rng.choice([other for other in NAMES if other != name]),
        "a_friend": with_article(friend_kind),
        "object": item,
        "an_object": with_article(item),
        "spot": spot,
        "spot2": spot2,
        "spot3": spot3,
    }
    steps, moral = rng.choice(PLOTS)
    parts = [rng.choice(OPENINGS), f"Every morning, {{name}} {rng.choice(HABITS)}."]
    parts += [rng.choice(step) for step in steps]
    parts.append(rng.choice(ENDINGS))
    return " ".join(part.format(**slots) for part in parts) + f"\n\n{MORAL_INTRO}{moral}"


def is_coherent(story: str, wish: Wish) -> bool:
    """Check length, cast, plot and moral of a story."""
    body, separator, moral = story.partition(f"\n\n{MORAL_INTRO}")
    hero_name = re.search(r" named (\w+) ", body)
    fitting = [steps for steps, plot_moral in PLOTS if plot_moral == moral]
    if not separator or not fitting or hero_name is None or not wish.granted_by(story):
        return False
    cast = {name for name in NAMES if re.search(rf"\b{name}\b", body)}
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
