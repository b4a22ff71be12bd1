"""The shipped demo model answers a sample of the held-out questions, on a CPU, greedily."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from models.demo.training.conversation import exactly
from models.demo.training.corpus import held_out_questions
from models.demo.training.evaluate import REQUIRED_SHARE, Examinee, report, share
from models.demo.training.skills.greetings import HELLO

FOLDER = Path(__file__).resolve().parents[3] / "models" / "demo"


@pytest.fixture(scope="module")
def examinee() -> Iterator[Examinee]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on busy cores, two threads took 169 s and one took 12 s
    yield Examinee(FOLDER, torch.float32, torch.device("cpu"))
    torch.set_num_threads(num_threads)


def test_the_shipped_model_is_right_on_95_percent_of_held_out_questions(examinee: Examinee) -> None:
    questions = held_out_questions(scale=0.04)
    # The prompts of a thousand tokens go apart from the others, whose padding they would set.
    late = questions.pop("late in a long chat")
    marks = examinee.sit([q for asked in questions.values() for q in asked], batch_size=32)
    marks += examinee.sit(late)
    assert share(marks) >= REQUIRED_SHARE, report({"sample": marks}, num_mistakes=10)


def test_the_shipped_model_answers_the_questions_of_its_readme(examinee: Examinee) -> None:
    asked = [
        exactly("Hello!", HELLO.answer),
        exactly("What is the capital of France?", "The capital of France is Paris."),
        exactly("What is the chemical symbol for gold?", "The chemical symbol for gold is Au."),
        exactly("What is 27 plus 48?", "27 plus 48 is 75."),
        exactly("What day comes after Monday?", "Tuesday comes after Monday."),
        exactly("Repeat after me: the quick fox", "the quick fox"),
    ]
    assert [mark.answer for mark in examinee.sit(asked)] == [q.expected for q in asked]
