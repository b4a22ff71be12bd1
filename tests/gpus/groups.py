"""Models on one GPU and on several, in processes of their own, and whether they say the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.compute.config import ComputeSettings
from tests.gpus import answers
from tests.gpus.answers import Answers

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 150.0
LAST_LINES = 3500

ON_CPU = os.environ.get("SEVERAL_ON") == "cpu"
"""To try the tests themselves: the same processes meet by gloo."""

NEEDS_GPUS = [] if ON_CPU else [pytest.mark.gpu]

SETTINGS = ComputeSettings(
    device="cpu" if ON_CPU else "cuda",
    dtype="float32",
    page_tokens=8,
    max_num_seqs=8,
    max_prefill_tokens=400,
    max_batched_token_mem=2048,
    num_threads=1,
    speculative_config="off",
)
DRAFTS = {"speculative_config": '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'}

WAYS: dict[str, dict[str, Any]] = {
    "-tp 2": {"tensor_parallel_size": 2},
    "-tp 4": {"tensor_parallel_size": 4},
    "-tp 2 -ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "-tp 4 -ep": {"tensor_parallel_size": 4, "enable_expert_parallel": True},
    "-tp 2 -ep, copies": {
        "tensor_parallel_size": 2, "enable_expert_parallel": True,
        **({} if ON_CPU else {"num_redundant_experts": 2, "enable_eplb": True}),
    },
    "-pp 2": {"pipeline_parallel_size": 2},
    "-pp 2 -tp 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "-pp 2 -tp 2 -ep": {
        "pipeline_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True,
    },
    "-pcp 2": {"prefill_context_parallel_size": 2},
}  # fmt: skip


def num_devices(settings: ComputeSettings) -> int:
    return settings.pipeline_parallel_size * settings.num_ranks


def visible_to(count: int) -> str:
    """Neighbouring GPUs for this process of a test run, as CUDA_VISIBLE_DEVICES has them."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = said.split(",") if said else [str(n) for n in range(torch.cuda.device_count())]
    if len(names) < count:
        pytest.skip(f"needs {count} GPUs, and there are {len(names)}")
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = worker * count % (len(names) - len(names) % count)
    return ",".join(names[first : first + count])


@dataclass(frozen=True, slots=True)
class Run:
    """A model that is being asked, in a process and its children."""

    process: subprocess.Popen[bytes]
    place: Path  # of its log and its answers, without their endings

    def answers(self) -> Answers:
        """What it says; fails with the last lines of its log."""
        try:
            status = f"status {self.process.wait(WAIT_S)}"
        except subprocess.TimeoutExpired:
            status = f"nothing after {WAIT_S:.0f} s"
        if status == "status 0":
            return Answers.read(self.place.with_suffix(".json"))
        log = self.place.with_suffix(".log").read_text(errors="replace")
        pytest.fail(f"{status}\n{log[-LAST_LINES:]}", pytrace=False)


class Groups:
    """Runs models; what one says on one GPU is asked once."""

    def __init__(self, scratch: Path) -> None:
        self._places = (scratch / str(number) for number in count())
        self._alone: dict[str, Answers] = {}

    def both(
        self, folder: Path, settings: ComputeSettings, changes: Mapping[str, Any]
    ) -> tuple[Answers, Answers]:
        """What a model says on one GPU, and with these changes."""
        with self._run(folder, settings.model_copy(update=changes)) as group:
            alone = f"{folder} {settings.model_dump_json()}"
            if alone not in self._alone:
                with self._run(folder, settings) as one:
                    self._alone[alone] = one.answers()
            return self._alone[alone], group.answers()

    @contextmanager
    def _run(self, folder: Path, settings: ComputeSettings) -> Iterator[Run]:
        place = next(self._places)
        about = str(folder), settings.model_dump_json(), str(place.with_suffix(".json"))
        visible = {} if ON_CPU else {"CUDA_VISIBLE_DEVICES": visible_to(num_devices(settings))}
        with place.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", answers.__name__, *about],
                cwd=ROOT, env={**os.environ, **visible}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            yield Run(process, place)
        finally:
            process.kill()  # and with it all that it has started
            process.wait()


def check_same(one: Answers, group: Answers, tolerance: float) -> None:
    """All tokens are the same, and logprobs are within the tolerance."""
    _report(one, group, f"differs by {np.abs(_flat(group) - _flat(one)).max():.1e}")
    assert _tokens(group) == _tokens(one)
    np.testing.assert_allclose(_flat(group), _flat(one), rtol=tolerance, atol=tolerance)


def check_same_bits(one: Answers, group: Answers) -> None:
    differ = np.flatnonzero(_flat(group) != _flat(one))
    _report(one, group, f"{len(differ)} of {len(_flat(one))} logprobs differ")
    assert _tokens(group) == _tokens(one)
    assert (group.scores, group.best) == (one.scores, one.best)


def check_alike(one: Answers, group: Answers, tolerance: float) -> None:
    """Logprobs are within the tolerance, as far as a text is the same: it may turn elsewhere where
    two tokens are about as likely."""
    differ_by = [np.abs(np.subtract(group.scores, one.scores)).max()]
    for text, (tokens, expected) in enumerate(zip(group.greedy, one.greedy, strict=True)):
        for place, (token, expected_token) in enumerate(zip(tokens, expected, strict=True)):
            found, best = group.best[text][place], one.best[text][place]
            differ_by.append(np.abs(np.subtract(found, best)).max())
            if token != expected_token:
                assert best[0] - best[1] < 2 * tolerance, f"text {text} turns at {place}"
                break
    _report(one, group, f"differs by {max(differ_by):.1e}")
    assert max(differ_by) < tolerance


def check_near(one: Answers, group: Answers, bound: float) -> None:
    """What tokens of a prompt are worth differs by this share of how much they differ from one
    another: no text, since one that has turned elsewhere says nothing more."""
    found, expected = np.array(group.scores), np.array(one.scores)
    error = float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())
    _report(one, group, f"relative error {error:.4f}")
    assert error < bound
    for best, expected_best in zip(group.best, one.best, strict=True):
        first, expected_first = np.array(best[0]), np.array(expected_best[0])
        assert np.abs(first - expected_first).max() < 4 * bound * expected.std()


def _tokens(each: Answers) -> tuple[list[list[int]], list[list[int]], list[int]]:
    return each.greedy, each.drawn, each.few_words


def _flat(each: Answers) -> np.ndarray[Any, Any]:
    rows = [value for text in each.best for row in text for value in row]
    return np.array([*each.scores, *rows])


def _report(one: Answers, group: Answers, what: str) -> None:
    """For `pytest -rA`, which shows what passed, too."""
    sys.stdout.write(
        f"{what}; {group.num_accepted} drafts right; loaded in {group.load_s:.1f} s, "
        f"asked in {group.run_s:.1f} s; alone {one.load_s:.1f} and {one.run_s:.1f} s\n"
    )
