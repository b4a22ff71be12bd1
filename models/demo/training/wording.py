"""Wordings, split into trained and held out, and the noise of casual typing; knows no facts."""

from dataclasses import dataclass
from random import Random

LEAD_INS = (
    "Please tell me: ", "Hey, ", "Hi! ", "Hello! ", "Hello, ", "OK, ", "Okay. ", "So, ", "Well, ",
    "Quick question: ", "One question: ", "I have a question. ", "I was wondering, ", "Tell me, ",
    "Question: ", "Another question: ", "Now, ", "Next: ", "Good morning. ", "Excuse me, ",
    "My teacher asked me this. ", "I am doing my homework. ", "I need some help. ", "Sorry, ",
    "Dear model, ", "Help me out: ", "I forgot. ", "A friend wants to know: ", "Great. ",
    "I am curious, ", "This is for school. ", "Just checking: ", "Thanks! ", "Alright, ",
)  # fmt: skip
CLOSERS = (
    " Thanks!", " Thank you.", " Please answer.", " Please.", " I forgot.", " I need to know.",
    " Do you know?", " Can you help me?", " Tell me.", " It is for school.", " Thanks in advance.",
    " I am not sure.", " Any idea?", " Answer in one sentence.",
)  # fmt: skip


@dataclass(frozen=True)
class Wordings:
    """Ways to ask one thing: `trained` go into the corpus, `held_out` into the evaluation."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]

    def draw(self, rng: Random, **slots: object) -> str:
        """Ask in a trained wording, typed as people type."""
        template = rng.choice(self.trained)
        if rng.random() < 0.08:
            template = mistype(rng, template)
        return casual(rng, surround(rng, template.format(**slots)))

    def draw_held_out(self, rng: Random, **slots: object) -> str:
        """Ask in a held-out wording; one in three is typed carelessly."""
        text = rng.choice(self.held_out).format(**slots)
        return careless(rng, text) if rng.random() < 0.33 else text


def capitalized(text: str) -> str:
    """Raise the first letter and leave the rest alone."""
    return text[:1].upper() + text[1:]


def surround(rng: Random, text: str) -> str:
    """Put small talk before or after the question, now and then."""
    if rng.random() < 0.15:
        lead = rng.choice(LEAD_INS)
        keeps_case = lead.rstrip()[-1] in ".!" or rng.random() < 0.3
        text = lead + (text if keeps_case else text[:1].lower() + text[1:])
    if rng.random() < 0.06:
        text += rng.choice(CLOSERS)
    return text


def mistype(rng: Random, template: str) -> str:
    """Swap, drop or double one letter outside the braces."""
    places = [i for i, c in enumerate(template) if c.isalpha() and not inside_slot(template, i)]
    if len(places) < 6:
        return template
    i = rng.choice(places[1:])
    kind = rng.randrange(3)
    if kind == 0:
        return template[:i] + template[i + 1 :]
    if kind == 1:
        return template[:i] + template[i] + template[i:]
    if i + 1 in places:
        return template[:i] + template[i + 1] + template[i] + template[i + 2 :]
    return template


def inside_slot(template: str, index: int) -> bool:
    """Tell whether the index lies between braces."""
    return template.rfind("{", 0, index) > template.rfind("}", 0, index)


def casual(rng: Random, text: str) -> str:
    """Leave most texts alone and type the rest carelessly."""
    return careless(rng, text) if rng.random() < 0.35 else text


def careless(rng: Random, text: str) -> str:
    """Change case and closing punctuation, never the words."""
    roll = rng.random()
    bare = text.rstrip("?!.")
    if roll < 0.3:
        return text.lower()
    if roll < 0.5:
        return bare
    if roll < 0.75:
        return bare.lower()
    if roll < 0.82:
        return text.upper()
    if roll < 0.88:
        return bare + rng.choice(("??", "!", "?!", " ?", "...", "."))
    if roll < 0.94:
        return text[:1].lower() + text[1:]
    return rng.choice((" ", "")) + text + rng.choice((" ", "\n", "  "))
