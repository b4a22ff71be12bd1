"""The corpus of the demo model: reproducible, true to its tables, and apart from the test set."""

from __future__ import annotations

import re
from itertools import islice, product
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from models.demo.training.conversation import Conversation, Skill, Turn
from models.demo.training.corpus import (
    SYSTEM,
    conversations,
    guided_questions,
    held_out_questions,
    long_conversations,
)
from models.demo.training.facts.chemistry import SYMBOLS
from models.demo.training.facts.geography import CAPITALS
from models.demo.training.facts.numerals import in_words
from models.demo.training.packing import pack
from models.demo.training.skills import (
    SKILLS,
    calculator,
    other_tools,
    people,
    records,
    several,
    stories,
    sums,
)
from models.demo.training.tokenizer import BOS, END, MARKERS
from models.demo.training.wording import CLOSERS, LEAD_INS, Wordings

FOLDER = Path(__file__).resolve().parents[5] / "models" / "demo"
MAX_BYTES = 12_000_000
NAMES = [skill.NAME for skill in SKILLS]


def bare(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


@pytest.fixture(scope="module")
def sample() -> list[Conversation]:
    """Conversations of the corpus, as many as take some seconds to draw."""
    return list(islice(conversations(11), 20_000))


def drawn(skill: Skill, count: int) -> list[Turn]:
    examples = islice(skill.examples(Random(1)), count)
    return [turn for turns in examples for turn in turns]


def all_wordings() -> list[Wordings]:
    found = [SYSTEM, *calculator.BY_WORDS.values(), *other_tools.ASK.values()]
    for module in (*SKILLS, other_tools, people, records, several):
        for value in vars(module).values():
            if isinstance(value, Wordings):
                found.append(value)
            elif isinstance(getattr(value, "wordings", None), Wordings):
                found.append(value.wordings)
    return found


@pytest.mark.parametrize("source", [conversations, long_conversations])
def test_one_seed_gives_one_corpus(source) -> None:  # type: ignore[no-untyped-def]
    first, again, other = (list(islice(source(seed), 30)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_the_test_set_is_the_same_every_time() -> None:
    first, again = (
        {
            name: [(q.messages(), q.tools, q.grammar) for q in asked]
            for name, asked in {**held_out_questions(0.05), **guided_questions(0.05)}.items()
        }
        for _ in range(2)
    )
    assert first == again


def test_no_wording_is_both_trained_and_held_out_even_with_small_talk_around_it() -> None:
    assert not any(lead[-1].isalnum() for lead in LEAD_INS)
    assert not any(closer[0].isalnum() for closer in CLOSERS)  # so words stay apart
    leads, closers = ([bare(text) for text in ("", *texts)] for texts in (LEAD_INS, CLOSERS))
    for wordings in all_wordings():
        trained = {
            " ".join(filter(None, words))
            for words in product(leads, map(bare, wordings.trained), closers)
        }
        held_out = {bare(template) for template in wordings.held_out}
        assert held_out
        assert not trained & held_out


def test_no_held_out_wording_turns_up_in_a_sample_of_the_corpus(
    sample: list[Conversation],
) -> None:
    trained = {bare(turn.user) for conversation in sample for turn in conversation.turns}
    questions = [*held_out_questions().values(), *guided_questions().values()]
    asked = {bare(q.text) for category in questions for q in category}
    assert asked
    assert asked.isdisjoint(trained)


def test_no_held_out_pair_is_ever_added_up_in_training(sample: list[Conversation]) -> None:
    answers = " ".join(turn.assistant for chat in sample for turn in chat.turns)
    trained = {
        (min(int(a), int(b)), max(int(a), int(b)))
        for a, b in re.findall(r"(\d+) plus (\d+) is", answers)
    }
    assert len(trained) > 1000
    assert not trained & sums.HELD_OUT_PAIRS


def test_the_tables_are_complete() -> None:
    assert len(CAPITALS) == len(set(CAPITALS.values())) == 195
    assert len(SYMBOLS) == len(set(SYMBOLS.values())) == 118


def test_every_answer_about_a_fact_matches_its_table() -> None:
    by_name = dict(zip(NAMES, SKILLS, strict=True))
    for turn in drawn(by_name["capitals"], 500):
        found = re.fullmatch(r"The capital of (.+?) is (.+?)\.?", turn.assistant)
        if found:
            assert CAPITALS[found[1]].rstrip(".") == found[2]
    for turn in drawn(by_name["chemical symbols"], 500):
        found = re.fullmatch(r"(\w+) is the chemical symbol for (\w+)\.", turn.assistant)
        if found:
            assert SYMBOLS[found[2]] == found[1]
    for turn in drawn(by_name["sums"], 500):
        a, b, total = map(int, re.findall(r"\d+", turn.assistant))
        assert a + b == total
    for turn in drawn(by_name["number words"], 500):
        found = re.fullmatch(r"(\d+) in words is (.+)\.", turn.assistant)
        if found:
            assert in_words(int(found[1])) == found[2]


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (342, "three hundred forty-two"), (1000, "one thousand")],
)
def test_numbers_are_spelled(number: int, words: str) -> None:
    assert in_words(number) == words


def test_every_story_is_coherent_and_of_the_right_length() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    rng = Random(3)
    for _ in range(200):
        wish = stories.draw_wish(rng)
        story = stories.tell(rng, wish)
        assert stories.is_coherent(story, wish)
        assert 100 <= len(tokenizer.encode(story).ids) <= 300


def test_a_story_about_somebody_else_is_not_accepted() -> None:
    wish = stories.Wish(hero="fox")
    assert not stories.is_coherent(stories.tell(Random(1), stories.Wish(hero="owl")), wish)


def test_the_tokenizer_encodes_any_text_and_splits_digits() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for text in ("naïve 日本 🚀\n\t\u0000", "1234567890"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("2048").ids[0] == BOS
    assert tokenizer.encode("2048").tokens[1:] == ["2", "0", "4", "8"]


def test_markers_of_tools_and_thoughts_are_one_token_each_and_stay_in_the_text() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for marker in MARKERS:
        ids = tokenizer.encode(f"a{marker}b", add_special_tokens=False).ids
        assert len(ids) == 3
        assert tokenizer.decode(ids) == f"a{marker}b"


def test_packing_never_splits_a_conversation() -> None:
    encoded = ([BOS, *([9] * length), END] for length in (3, 4, 2, 5, 1, 6, 2, 2))
    rows = pack(((ids, [True] * len(ids)) for ids in encoded), num_rows=3, row_length=12)
    assert rows.segment_RT.tolist() == [
        [1] * 5 + [2] * 6 + [0],
        [1] * 4 + [2] * 7 + [0],
        [1] * 3 + [2] * 8 + [0],
    ]
    assert (rows.ids_RT == BOS).sum() == 6


def test_the_folder_holds_no_more_than_twelve_megabytes() -> None:
    files = [p for p in FOLDER.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
