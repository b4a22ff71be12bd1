"""Whether a static tree of at most four drafts would be right more often than a chain; computed.

    python -m benchmarks.draft_trees [--scale 0.02]

The demo model answers held-out questions with the server's noise. Along its texts the small twin
says what it would have drafted, first and second, with the same noise; the text itself, what
stood behind the last tokens before. That gives the steps which any tree would have taken, since
what a draft is followed by matters only where the draft was right.

Shape legend: T tokens of prompt and answer, N new tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import Report
from models.demo.training.corpus import held_out_questions
from models.demo.training.evaluate import SHIPPED, Examinee
from models.demo.training.tokenizer import END
from services.compute.sampling.noise import coordinates, gumbel_noise

MOST_DRAFTS = 4
MOST_ALIKE = 5
MAX_TOKENS = 200
TEMPERATURES = (0.0, 0.5, 0.8, 1.0, 1.2, 2.0)

Tree: TypeAlias = frozenset[tuple[int, ...]]  # drafts as paths: which choice at each place
CHAINS = [frozenset((0,) * length for length in range(1, n + 1)) for n in range(MOST_DRAFTS + 1)]


class Costs(NamedTuple):
    """Of steps of 1, 2, 4 and 8 rows, in ms, and of a drafter's pass, in steps of one row."""

    name: str
    step_ms: tuple[float, float, float, float]
    pass_share: float

    def step(self, tree: Tree) -> float:
        """What a step takes in which this is drafted before, in ms."""
        step_ms = float(np.interp(1 + len(tree), (1, 2, 4, 8), self.step_ms))
        return step_ms + depth_of(tree) * self.pass_share * self.step_ms[0]


CPU_MS = 2.75, 3.35, 3.35, 3.90  # the demo on two cores, as kept when results/drafts.md was made
H100_MS = 5.23, 5.65, 5.65, 5.68  # 8B: results/speculative.md
COSTS = Costs("CPU", CPU_MS, 0.65), Costs("H100", H100_MS, 0.2), Costs("H100", H100_MS, 0.0)


class Text(NamedTuple):
    """One answer, and as which choice each of its tokens was drafted behind the text before it."""

    ids_T: list[int]
    num_prompt: int
    ranks_N: list[int]
    right_N: list[float]  # probability that a draft counts by rejection, given what was said


class Writer:
    """The demo model and its twin, which read and write with the server's noise."""

    def __init__(self) -> None:
        twin = SHIPPED.parent / "demo_draft"
        self._models = [self._load(folder) for folder in (SHIPPED, twin)]

    @staticmethod
    def _load(folder: Path) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.eval()

    @torch.inference_mode()
    def write(
        self, prompt: list[int], temperature: float, seed: int, past_end: bool = False
    ) -> Text:
        large, small = self._models
        ids, given, cache = [*prompt], prompt, None
        rows, noises = [], []
        while len(ids) < len(prompt) + MAX_TOKENS and (past_end or ids[-1] != END):
            out = large(torch.tensor([given]), past_key_values=cache, use_cache=True)
            logits_V, cache = out.logits[0, -1], out.past_key_values
            index = np.array([len(ids) - len(prompt)])
            where = coordinates(np.array([seed]), np.zeros_like(index), index)
            noises.append(gumbel_noise(where, len(logits_V))[0])
            rows.append(logits_V)
            ids.append(int(_with_noise(logits_V, noises[-1], temperature).argmax()))
            given = ids[-1:]
        small_TV = small(torch.tensor([ids[:-1]])).logits[0, len(prompt) - 1 :]
        said_N = torch.tensor(ids[len(prompt) :])
        drafted_NV = _with_noise(small_TV, torch.stack(noises), temperature)
        of_said_N = drafted_NV.gather(1, said_N[:, None])
        ranks_N = (drafted_NV > of_said_N).sum(dim=1).tolist()
        heat = temperature or 1e-4
        p, q = ((x / heat).softmax(-1) for x in (torch.stack(rows), small_TV))
        p_N, q_N = (x.gather(1, said_N[:, None])[:, 0] for x in (p, q))
        right_N = (q_N / p_N.clamp(min=1e-30)).clamp(max=1.0).tolist()
        return Text(ids, len(prompt), ranks_N, right_N)


def _with_noise(logits: torch.Tensor, noise: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits / temperature + noise if temperature else logits


def trees(most: int) -> list[Tree]:
    """All with so many drafts: a choice at a place is there only beside the likelier ones."""
    found: set[Tree] = {frozenset()}
    for _ in range(most):
        found |= {
            tree | {(*path, choice)}
            for tree in found
            for path in ((), *tree)
            for choice in range(MOST_DRAFTS)
            if (*path, choice) not in tree and (not choice or (*path, choice - 1) in tree)
        }
    return sorted(found, key=sorted)


TREES = trees(MOST_DRAFTS)


def steps(text: Text, tree: Tree) -> int:
    """How many an answer takes, the first token of which comes with the prompt."""
    place, count = 1, 0
    while place < len(text.ranks_N):
        path: tuple[int, ...] = ()
        left = text.ranks_N[place:]
        while len(path) < len(left) and (*path, left[len(path)]) in tree:
            path = (*path, left[len(path)])
        place, count = place + len(path) + 1, count + 1
    return count


def places(ids_T: np.ndarray, end: int) -> list[int]:
    """Where the last tokens before `end` stood before, the best first, of each next token one."""
    alike: dict[int, tuple[int, int]] = {}
    before_T = np.flatnonzero(ids_T[: end - 1] == ids_T[end - 1])
    for place in before_T.tolist():
        count = 1
        while count < MOST_ALIKE and count <= place:
            if ids_T[place - count] != ids_T[end - 1 - count]:
                break
            count += 1
        if count >= 2:
            following = int(ids_T[place + 1])
            alike[following] = max(alike.get(following, (0, 0)), (count, place))
    return [place for _, place in sorted(alike.values(), reverse=True)]


def lookup_steps(text: Text, lengths: Sequence[int]) -> int:
    """With chains of these lengths from the best places, the second best …"""
    ids_T = np.array(text.ids_T)
    end, count = text.num_prompt + 1, 0
    while end < len(ids_T):
        most = 0
        for place, length in zip(places(ids_T, end), lengths, strict=False):
            drafts = ids_T[place + 1 : min(place + 1 + length, end)]
            said = ids_T[end : end + len(drafts)]
            is_right = drafts[: len(said)] == said
            most = max(most, int(is_right.cumprod().sum()))
        end, count = end + most + 1, count + 1
    return count


def tokens_a_step(texts: Sequence[Text], count: Callable[[Text], int]) -> float:
    num_tokens = sum(len(text.ranks_N) - 1 for text in texts)
    return num_tokens / sum(map(count, texts))


def depth_of(tree: Tree) -> int:
    return max(map(len, tree), default=0)


def shape(tree: Tree) -> str:
    """`2·1`: two drafts at the first place, one at the second; by how far each goes."""
    places = range(1, depth_of(tree) + 1)
    widths = [sum(len(path) == place for path in tree) for place in places]
    return "·".join(map(str, widths)) or "none"


def of_trees(texts: Sequence[Text], name: str) -> list[list[object]]:
    """Rows of a table: the best chain and the best tree, by what steps and passes take."""
    rates = {tree: tokens_a_step(texts, partial(steps, tree=tree)) for tree in TREES}
    rows: list[list[object]] = []
    for costs in COSTS:
        per_s = {tree: rate / costs.step(tree) for tree, rate in rates.items()}
        chain, tree = max(CHAINS, key=per_s.__getitem__), max(TREES, key=per_s.__getitem__)
        cells = [name, costs.name, costs.pass_share, shape(chain), f"{rates[chain]:.2f}"]
        rows.append(
            [*cells, shape(tree), f"{rates[tree]:.2f}", f"{per_s[tree] / per_s[chain]:.3f}"]
        )
    return rows


def main() -> None:
    """Read the command line, compute, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=0.02)
    scale = parser.parse_args().scale
    examinee = Examinee(SHIPPED, torch.float32, torch.device("cpu"))
    questions = [question for some in held_out_questions(scale).values() for question in some]
    prompts = [examinee.prompt(question) for question in questions]
    writer = Writer()
    tree_rows: list[list[object]] = []
    accepted_rows: list[list[object]] = []
    lookup_rows: list[list[object]] = []
    shapes = ((4,), (3, 1), (2, 2), (2, 1, 1), (1, 1, 1, 1))
    for temperature in TEMPERATURES:
        texts = [writer.write(prompt, temperature, seed) for seed, prompt in enumerate(prompts)]
        name = f"temperature {temperature}"
        ranks = [rank for text in texts for rank in text.ranks_N]
        shares = [sum(rank == choice for rank in ranks) / len(ranks) for choice in range(3)]
        by_rejection = statistics.fmean(right for text in texts for right in text.right_N)
        cells = [f"{share:.3f}" for share in (*shares, by_rejection)]
        accepted_rows.append([name, len(ranks), *cells])
        tree_rows += of_trees(texts, name)
        rates = [tokens_a_step(texts, partial(lookup_steps, lengths=lengths)) for lengths in shapes]
        lookup_rows.append([name, *(f"{rate:.3f}" for rate in rates)])
    report = Report(
        "draft_trees",
        "Trees of drafts, and how they are accepted",
        "Target: none; a tree is worth building where it gives much more than a chain.",
    )
    report.text(f"{len(prompts)} held-out questions, each answered with noise of its own.")
    columns = ["the twin's drafts", "tokens", "first is right", "second", "third", "by rejection"]
    report.table(columns, accepted_rows)
    columns = ["the twin", "steps of", "pass, in steps", "best chain", "tokens a step"]
    report.table([*columns, "best tree", "tokens a step", "tree, times"], tree_rows)
    columns = ["lookups: drafts of the places", *("+".join(map(str, each)) for each in shapes)]
    report.table(columns, lookup_rows)
    report.write()


if __name__ == "__main__":
    main()
