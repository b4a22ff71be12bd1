"""How many of a small model's drafts count: by noise that they share with tokens, and by rejection.

    python -m benchmarks.draft_acceptance [--questions 40]

Two servers of the demo model on the CPU draft three tokens a row with its small twin, and answer
the same held-out questions. By rejection the texts are others, of the same distribution.
"""

from __future__ import annotations

import argparse
import contextlib
import json

from benchmarks.drafts import DEMO
from benchmarks.past_answers import drafts_of, post
from benchmarks.report import Report
from benchmarks.stack import ROOT, Stack
from models.demo.training.conversation import Question
from models.demo.training.corpus import held_out_questions

TEMPERATURES = (0.5, 0.8, 1.0, 1.2)
NUM_DRAFTS = 3
MAX_TOKENS = 128


def config(acceptance: str) -> str:
    twin = str(ROOT / "models" / "demo_draft")
    fields = {"model": twin, "num_speculative_tokens": NUM_DRAFTS, "acceptance": acceptance}
    return json.dumps(fields)


def plain_questions(count: int) -> list[Question]:
    """Those that need no tool, of each kind in turn."""
    kinds = [
        [each for each in some if not (each.tools or each.thinks)]
        for some in held_out_questions(0.1).values()
    ]
    most = max(map(len, kinds))
    return [kind[n] for n in range(most) for kind in kinds if n < len(kind)][:count]


def answer(stack: Stack, questions: list[Question], temperature: float) -> list[object]:
    """All questions; as cells: tokens a step, and the share of drafts that counted."""
    num_tokens = num_right = num_wrong = 0
    for seed, question in enumerate(questions):
        body = {"messages": question.messages(), "temperature": temperature, "seed": seed}
        body |= {"model": "demo", "max_tokens": MAX_TOKENS}
        usage = post(stack, "/v1/chat/completions", body)["usage"]
        num_tokens += usage["completion_tokens"] - 1  # the first comes with the prompt
        right, wrong = drafts_of(usage)
        num_right, num_wrong = num_right + right, num_wrong + wrong
    share = num_right / (num_right + num_wrong)
    return [f"{num_tokens / (num_tokens - num_right):.2f}", f"{share:.3f}"]


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=40)
    questions = plain_questions(parser.parse_args().questions)
    options = "--device", "cpu", "--dtype", "float32", "--served-model-name", "demo"
    with contextlib.ExitStack() as stack:
        stacks = [
            stack.enter_context(Stack(DEMO, *options, "--speculative-config", config(acceptance)))
            for acceptance in ("shared_noise", "rejection")
        ]
        rows: list[list[object]] = []
        for temperature in TEMPERATURES:
            cells = [answer(each, questions, temperature) for each in stacks]
            rows.append([f"{temperature}", *cells[0], *cells[1]])
    report = Report(
        "draft_acceptance",
        "Drafts by shared noise and by rejection",
        "Target: none; the better one is the default.",
    )
    report.text(
        f"The demo model in float32 over HTTP, {NUM_DRAFTS} drafts a row of `models/demo_draft`, "
        f"one stream, {len(questions)} held-out questions, at most {MAX_TOKENS} tokens."
    )
    columns = ["temperature"]
    for name in ("shared noise", "rejection"):
        columns += [f"{name}: tokens a step", "drafts right"]
    report.table(columns, rows)
    report.write()


if __name__ == "__main__":
    main()
