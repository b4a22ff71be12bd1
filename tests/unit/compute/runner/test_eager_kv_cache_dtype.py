"""With a quantized KV cache the eager runner gives what transformers gives with rounded keys and
values, whatever happens to pages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.accuracy import far_questions
from common.messages.sampling import SamplingParams
from models.demo.training.corpus import held_out_questions
from models.demo.training.evaluate import Examinee
from models.demo.training.tokenizer import MAX_POSITIONS
from services.compute.config import ComputeSettings
from services.compute.runner.model_loader import KV_CACHE_DTYPES
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_server import Server
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.quantized_cache import RoundedModel
from tests.unit.compute.runner_scenarios import COUNT, PAGE_TOKENS, PROMPTS, RunnerScenarios
from tests.unit.compute.tiny_models import greedy_ids, make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu",
    dtype="float32",
    page_tokens=PAGE_TOKENS,
    max_num_seqs=8,
    max_batched_token_mem=2048,
    swap_space=0.01,
    num_threads=1,
)
DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"
NUM_FAR = 3
# Each dtype with each kind of entries and pages: whole contexts, windows, latents. Whether every
# layer has a window or only some have makes no difference to what an entry is.
PAIRS = [
    *(("llama", dtype) for dtype in KV_CACHE_DTYPES),
    ("mistral_window", "fp8"),
    ("qwen2_window", "int8"),
    *(("deepseek_v3", dtype) for dtype in KV_CACHE_DTYPES),
]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    pair: tuple[str, str] = request.param
    return pair


@pytest.fixture(scope="module")
def model(pair: tuple[str, str]) -> PreTrainedModel:
    return make_model(pair[0])


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dtype(pair: tuple[str, str]) -> str:
    return pair[1]


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, dtype: str) -> list[list[int]]:
    rounded = RoundedModel(model, KV_CACHE_DTYPES[dtype])
    return [rounded.greedy_ids(prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture
def hand(folder: Path, dtype: str) -> HandScheduler:
    settings = SETTINGS.model_copy(update={"kv_cache_dtype": dtype})
    return HandScheduler(load_on_cpu(folder, settings), PAGE_TOKENS)


class TestEagerRunner(RunnerScenarios):
    pass


def test_rounding_is_felt(model: PreTrainedModel, expected: list[list[int]]) -> None:
    """These models are so sensitive to it that the tests above would not pass without it."""
    assert [greedy_ids(model, prompt, COUNT) for prompt in PROMPTS] != expected


class Exam:
    """Held-out questions for the demo model; the last ones, after a full context, need a tool that
    is declared at its beginning.
    """

    def __init__(self) -> None:
        self._examinee = Examinee(DEMO, torch.float32, torch.device("cpu"))
        self._questions = [q for asked in held_out_questions(scale=0.0025).values() for q in asked]
        self._questions += far_questions(self._examinee, NUM_FAR)
        self.prompts = [self._examinee.prompt(question) for question in self._questions]

    def answers(self, kv_cache_dtype: str) -> list[list[int]]:
        settings = ComputeSettings(
            device="cpu", dtype="float32", kv_cache_dtype=kv_cache_dtype, num_threads=1
        )
        server = Server(load_on_cpu(DEMO, settings), settings)
        for counter, prompt in enumerate(self.prompts):
            room = MAX_POSITIONS - len(prompt)
            server.ask(counter, prompt, SamplingParams(max_tokens=room, seed=1, temperature=0.0))
        server.run()
        return [server.tokens[counter] for counter in range(len(self.prompts))]

    def right(self, answers: list[list[int]]) -> list[bool]:
        pairs = zip(self._questions, answers, strict=True)
        return [self._examinee.mark(question, ids).is_right for question, ids in pairs]


@pytest.fixture(scope="module")
def exam() -> Exam:
    return Exam()


@pytest.fixture(scope="module")
def as_ever(exam: Exam) -> list[bool]:
    return exam.right(exam.answers("auto"))


@pytest.mark.parametrize("name", list(KV_CACHE_DTYPES))
def test_the_demo_model_is_as_right_and_finds_what_stands_at_the_beginning_of_a_full_context(
    name: str, exam: Exam, as_ever: list[bool]
) -> None:
    """But for one answer in each half: `python -m benchmarks.accuracy` asks thousands."""
    right = exam.right(exam.answers(name))
    assert sum(right[:-NUM_FAR]) >= sum(as_ever[:-NUM_FAR]) - 1 >= 0.95 * len(right[:-NUM_FAR])
    assert sum(right[-NUM_FAR:]) >= sum(as_ever[-NUM_FAR:]) - 1 >= 0.6 * NUM_FAR
    assert min(map(len, exam.prompts[-NUM_FAR:])) > MAX_POSITIONS - 200
