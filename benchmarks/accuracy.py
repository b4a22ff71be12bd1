"""What do fewer bits cost the demo model: right answers, perplexity, and what stands far back?

    python -m benchmarks.accuracy [--scale 1.0] [--device cpu]

Each variant is a server that is asked the same held-out questions, greedily and 16 at once, as
`python -m models.demo.training.evaluate` asks them of transformers. Far back stands the declaration
of a tool: it is at the beginning of a prompt that fills the model's context, behind it are turns
without tools, and at the end is a question that needs it, so that its names have to be fetched over
nearly all positions. Perplexity is that of chats made as the training's were, by other seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import urllib.request
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.report import Report
from benchmarks.stack import ROOT, Stack
from models.demo.training.conversation import Conversation, Question, Turn
from models.demo.training.corpus import (
    NEEDS_TOOL,
    TEST_SEED,
    Mixture,
    conversations,
    held_out_questions,
    long_conversations,
)
from models.demo.training.evaluate import Examinee, Mark, share
from models.demo.training.skills import calculator, other_tools, weather
from models.demo.training.tokenizer import END, MAX_POSITIONS

BY_NAME_ONLY = True
DEMO = ROOT / "models" / "demo"
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": (),
    "KV fp8": ("--kv-cache-dtype", "fp8"),
    "KV int8": ("--kv-cache-dtype", "int8"),
    "weights fp8": ("--quantization", "fp8"),
    "weights int8": ("--quantization", "int8"),
    "weights int4": ("--quantization", "int4"),
    "weights and KV fp8": ("--quantization", "fp8", "--kv-cache-dtype", "fp8"),
}
AT_ONCE = 16
SEED = 2024
FAR, NUM_FAR = "tool far back", 300
ANSWER_ROOM = 100  # of a call
FULL = MAX_POSITIONS - ANSWER_ROOM - 8
MAX_TURN_LETTERS = 160  # so that turns fill the context to the last hundred positions
TEXTS = {"short chats": (conversations, 600), "long chats": (long_conversations, 60)}
SEED_OF_TEXTS = TEST_SEED + 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one variant made of all questions, by category."""

    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    marks: dict[str, list[Mark]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)  # of texts' tokens

    @property
    def share(self) -> float:
        """Of right answers, in all categories but the one that is asked here alone."""
        return share([mark for name, some in self.marks.items() if name != FAR for mark in some])

    def perplexity(self, name: str) -> float:
        found = self.logprobs[name]
        return math.exp(-sum(found) / len(found))

    def same_as(self, other: Outcome, names: Sequence[str]) -> float:
        """Share of answers that are the other's to the last token."""
        pairs = [
            ours == theirs
            for name in names
            for ours, theirs in zip(self.answers[name], other.answers[name], strict=True)
        ]
        return sum(pairs) / len(pairs)


def far_questions(examinee: Examinee, count: int) -> Iterator[Question]:
    """Yield questions for a tool that is declared at the beginning of a full context."""
    rng = Random(SEED)
    mixture = Mixture(rng)
    sources = (weather.call_questions, calculator.call_questions, other_tools.questions)
    streams = [source(rng) for source in sources]
    for number in range(count):
        question = replace(next(streams[number % len(streams)]), history=())
        turns: list[Turn] = []
        while len(turns) < 100:
            turns += [
                turn
                for turn in mixture.turns(20)
                if not NEEDS_TOOL.search(turn.user) and len(turn.assistant) < MAX_TURN_LETTERS
            ]

        def length(num_turns: int) -> int:
            history = tuple(turns[:num_turns])  # noqa: B023
            return len(examinee.prompt(replace(question, history=history, num_tokens=range(2))))  # noqa: B023

        most = bisect_right(range(len(turns)), FULL, key=length) - 1
        room = range(1, ANSWER_ROOM)
        yield replace(question, history=tuple(turns[:most]), num_tokens=room)


def texts_of(chats: Iterable[Conversation]) -> Iterator[list[int]]:
    """Yield chats as the template writes them, as much of each as fits."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    for chat in chats:
        text = tokenizer.apply_chat_template(
            chat.messages(), tools=list(chat.tools) or None, tokenize=False
        )
        yield tokenizer.encode(text, add_special_tokens=False)[: MAX_POSITIONS - 1]


class Server:
    """Asks one server; as many requests at once as there are threads."""

    def __init__(self, stack: Stack, pool: ThreadPoolExecutor) -> None:
        self._url = stack.url + "/v1/completions"
        self._pool = pool

    def answers(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Continue prompts greedily."""
        return list(self._pool.map(self._answer, prompts))

    def logprobs(self, texts: Sequence[list[int]]) -> list[float]:
        """Logprobs of all the tokens of these texts but their first ones."""
        return [logprob for found in self._pool.map(self._logprobs, texts) for logprob in found]

    def _answer(self, prompt: list[int]) -> list[int]:
        room = MAX_POSITIONS - len(prompt)
        more = {"max_tokens": min(310, room), "return_token_ids": True}
        (choice,) = self._ask(prompt, more)["choices"]
        ids: list[int] = choice["token_ids"]
        ended = choice["finish_reason"] == "stop" and ids[-1:] != [END]
        return [*ids, END] if ended else ids

    def _logprobs(self, text: list[int]) -> list[float]:
        more = {"max_tokens": 0, "echo": True, "logprobs": 0}
        (choice,) = self._ask(text, more)["choices"]
        found: list[float] = choice["logprobs"]["token_logprobs"]
        return found[1:]

    def _ask(self, prompt: list[int], more: dict[str, Any]) -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, "temperature": 0, **more}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return dict(json.load(answer))


class Exam:
    """The questions of all categories, with their prompts."""

    def __init__(self, scale: float) -> None:
        self._examinee = Examinee(DEMO, torch.float32, torch.device("cpu"))
        self.questions = held_out_questions(scale)
        num_far = max(1, round(NUM_FAR * scale))
        self.questions[FAR] = list(far_questions(self._examinee, num_far))
        self.prompts = {
            name: [self._examinee.prompt(question) for question in asked]
            for name, asked in self.questions.items()
        }
        self.texts = {
            name: list(texts_of(islice(make(SEED_OF_TEXTS), max(1, round(count * scale)))))
            for name, (make, count) in TEXTS.items()
        }

    def sit(self, options: Sequence[str]) -> Outcome:
        """Start a server with these options and ask it everything."""
        outcome = Outcome()
        with Stack(DEMO, *options) as stack, ThreadPoolExecutor(AT_ONCE) as pool:
            server = Server(stack, pool)
            for name, questions in self.questions.items():
                prompts = self.prompts[name]
                answers = outcome.answers[name] = server.answers(prompts)
                pairs = zip(questions, answers, strict=True)
                outcome.marks[name] = [self._examinee.mark(q, ids) for q, ids in pairs]
            for name, texts in self.texts.items():
                outcome.logprobs[name] = server.logprobs(texts)
        return outcome


def write(exam: Exam, outcomes: Mapping[str, Outcome], options: Sequence[str]) -> None:
    report = Report(
        "accuracy",
        "Fewer bits and the demo model",
        "Right answers, perplexity, and a tool that stands at the beginning of a full context.",
    )
    (first, *_) = outcomes.values()
    names = [name for name in exam.questions if name != FAR]
    num_asked = sum(len(exam.questions[name]) for name in names)
    report.text(f"Served with `{' '.join(options)}`, and what a row's name says.")
    report.table(
        ["", f"right of {num_asked:,}", "the first one's answers to the last token",
         *(f"perplexity of {name}" for name in exam.texts)],
        [
            [name, f"{outcome.share:.2%}", f"{outcome.same_as(first, names):.2%}",
             *(f"{outcome.perplexity(text):.4f}" for text in exam.texts)]
            for name, outcome in outcomes.items()
        ],
    )  # fmt: skip
    sizes = [f"{len(texts):,} {name} of {sum(map(len, texts)):,} tokens"
             for name, texts in exam.texts.items()]  # fmt: skip
    report.text(f"Perplexity is that of {' and of '.join(sizes)}.")
    lengths = sorted(map(len, exam.prompts[FAR]))
    report.text(
        f"A tool far back: {len(lengths)} prompts of {lengths[0]:,} to {lengths[-1]:,} tokens, of "
        f"{MAX_POSITIONS:,} positions."
    )
    report.table(
        ["", "right calls", "the first one's calls to the last token"],
        [
            [name, f"{share(outcome.marks[FAR]):.1%}", f"{outcome.same_as(first, [FAR]):.1%}"]
            for name, outcome in outcomes.items()
        ],
    )
    report.text("Right answers by category:")
    report.table(
        ["category", "asked", *outcomes],
        [
            [
                name,
                len(exam.questions[name]),
                *(f"{share(o.marks[name]):.1%}" for o in outcomes.values()),
            ]
            for name in names
        ],
    )
    report.write()


def main() -> None:
    """Read the command line, let every variant sit the exam, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the questions to ask")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    exam = Exam(given.scale)
    common = ("--device", given.device, "--dtype", given.dtype)
    outcomes = {name: exam.sit((*common, *more)) for name, more in VARIANTS.items()}
    write(exam, outcomes, common)


if __name__ == "__main__":
    main()
