"""What a model says, on as many GPUs as the settings ask for.

`python -m tests.gpus.answers FOLDER SETTINGS OUT` is the leader of a group, as compute is: other
ranks and stages are started as it starts them. What is said goes to a file, since logs are printed.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common.child_main import die_with_parent
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner.registry import load_runner
from services.compute.scheduler.outputs import Output, sequence_outputs
from tests.unit.compute.engine_server import Server
from tests.unit.compute.runner_scenarios import prompt_of

GREEDY = SamplingParams(12, seed=1, temperature=0.0, ignore_eos=True, num_logprobs=3)
SCORED = replace(GREEDY, num_prompt_logprobs=0)
DRAWN = SamplingParams(16, seed=0, temperature=0.9, ignore_eos=True)
FEW_WORDS = replace(GREEDY, temperature=0.8, logit_bias=((5, 40.0), (9, 37.0)))

LENGTHS = (37, 300, 5)
"""Of prompts: the second is so long that two processes share it."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Of each request its tokens and the best logprobs beside each; those of the first prompt."""

    greedy: list[list[int]]
    best: list[list[list[float]]]
    scores: list[float]
    drawn: list[list[int]]
    few_words: list[int]
    num_accepted: int  # drafts
    load_s: float
    run_s: float

    @staticmethod
    def read(file: Path) -> Answers:
        return Answers(**json.loads(file.read_text()))


class ScoredServer(Server):
    """One that keeps what the prompts' tokens were worth."""

    scores: list[float]

    def hear(self, outputs: list[Output]) -> None:
        for event in sequence_outputs(outputs):
            for scored in event.scored:
                self.scores += scored.logprobs.values
        super().hear(outputs)


def answers(folder: Path, settings: ComputeSettings) -> Answers:
    """Greedy texts beside each other, then draws of which nobody wants to know more, for which
    ranks keep their parts of the logits, then a text that repeats a word, which is drafted."""
    began_s = time.monotonic()
    runner = load_runner(folder, settings)
    loaded_s = time.monotonic()
    server = ScoredServer(runner, settings)
    server.scores = []
    for counter, length in enumerate(LENGTHS):
        server.ask(counter, prompt_of(length, length), SCORED if counter == 0 else GREEDY)
    server.run()
    for counter in (10, 11, 12):
        server.ask(counter, prompt_of(counter, counter), replace(DRAWN, seed=counter))
    server.run()
    server.ask(20, [9, 5, 5, 5, 5], FEW_WORDS)
    server.run()
    ended_s = time.monotonic()
    runner.close()
    return Answers(
        greedy=[server.tokens[counter] for counter in range(len(LENGTHS))],
        best=[
            [list(row.top_logprobs) for row in server.logprobs[counter]]
            for counter in range(len(LENGTHS))
        ],
        scores=server.scores,
        drawn=[server.tokens[counter] for counter in (10, 11, 12)],
        few_words=server.tokens[20],
        num_accepted=server.scheduler.stats().accepted_drafts_total,
        load_s=loaded_s - began_s,
        run_s=ended_s - loaded_s,
    )


def main(folder: str, settings: str, out: str) -> None:
    die_with_parent()
    found = answers(Path(folder), ComputeSettings.model_validate_json(settings))
    Path(out).write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
