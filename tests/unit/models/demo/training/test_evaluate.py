"""The shipped demo model answers a sample of the held-out questions, on a CPU, greedily."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.demo.training.conversation import Call, Question, exactly
from models.demo.training.corpus import guided_questions, held_out_questions
from models.demo.training.evaluate import REQUIRED_SHARE, Examinee, report, share
from models.demo.training.skills.greetings import HELLO

FUNCTIONS = {"get_weather": "city", "calculator": "expression"}
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"}},
                "required": [parameter],
            },
        },
    }
    for name, parameter in FUNCTIONS.items()
)
FOLDER = Path(__file__).resolve().parents[5] / "models" / "demo"


@pytest.fixture(scope="module")
def examinee() -> Iterator[Examinee]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on busy cores, two threads took 169 s and one took 12 s
    yield Examinee(FOLDER, torch.float32, torch.device("cpu"))
    torch.set_num_threads(num_threads)


def test_the_shipped_model_is_right_on_95_percent_of_held_out_questions(examinee: Examinee) -> None:
    questions = {**held_out_questions(scale=0.006), **guided_questions(scale=0.006)}
    # The prompts of a thousand tokens go apart from the others, whose padding they would set.
    late = questions.pop("late in a long chat")
    marks = examinee.sit([q for asked in questions.values() for q in asked], batch_size=8)
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


def calling(text: str, *values: tuple[str, str]) -> Question:
    calls = (Call(name, {FUNCTIONS[name]: value}) for name, value in values)
    return replace(exactly(text, "\n".join(call.text() for call in calls)), tools=TOOLS)


def told(text: str, name: str, value: str, result: str, answer: str) -> Question:
    call = Call(name, {FUNCTIONS[name]: value})
    return replace(exactly(text, answer), tools=TOOLS, calls=(call,), results=(result,))


def test_the_shipped_model_calls_the_tools_of_its_readme(examinee: Examinee) -> None:
    asked = [
        calling("What is the weather in Paris?", ("get_weather", "Paris")),
        calling("weather in Paris and Rome", ("get_weather", "Paris"), ("get_weather", "Rome")),
        calling("What is 12 * 34?", ("calculator", "12 * 34")),
        calling("Calculate (3+4)*5", ("calculator", "(3 + 4) * 5")),
        calling("what's 17 times 23", ("calculator", "17 * 23")),
        replace(exactly("Hello!", HELLO.answer), tools=TOOLS),
        replace(exactly("What is the capital of Italy?", "The capital of Italy is Rome."),
                tools=TOOLS),
    ]  # fmt: skip
    assert [mark.answer for mark in examinee.sit(asked)] == [q.expected for q in asked]


def test_the_shipped_model_says_what_its_tools_have_answered(examinee: Examinee) -> None:
    weather, sums = "What is the weather in Paris?", "What is 12 * 34?"
    asked = [
        told(weather, "get_weather", "Paris",
             '{"city":"Paris","temperature_c":18,"condition":"sunny"}',
             "In Paris it is 18 degrees and sunny."),
        told(weather, "get_weather", "Paris", "18 degrees and sunny",
             "In Paris it is 18 degrees and sunny."),
        told(weather, "get_weather", "Paris", '{"error": "timeout"}',
             "Sorry, that did not work: timeout."),
        told(sums, "calculator", "12 * 34", "408", "12 * 34 is 408."),
    ]  # fmt: skip
    assert [mark.answer for mark in examinee.sit(asked)] == [q.expected for q in asked]


def test_without_a_tool_the_shipped_model_does_not_make_the_weather_up(examinee: Examinee) -> None:
    answer = "I cannot know the weather in Paris. I have no tool here to look it up."
    [mark] = examinee.sit([exactly("What is the weather in Paris?", answer)])
    assert mark.answer == answer


def test_the_shipped_model_thinks_where_it_is_told_to(examinee: Examinee) -> None:
    question = replace(exactly("What is 27 plus 48?", "27 plus 48 is 75."), thinks=True)
    [mark] = examinee.sit([question])
    assert mark.is_right
