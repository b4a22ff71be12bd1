"""What is captured of a pass and replayed says, bit for bit, what its calls say one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.kernels.cpu.graph import (
    BFLOAT16,
    add_norm,
    noted,
    packed,
    replay,
    replay_parts,
)
from services.compute.kernels.cpu.team import team_of
from services.compute.layers import captured_pass, row_attention
from services.compute.layers.captured_pass import CapturedPass, CapturedPasses
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.models.family_models import FAMILIES, random_model
from tests.unit.compute.tiny_models import make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu",
    dtype="bfloat16",
    page_tokens=4,
    max_num_seqs=4,
    max_batched_token_mem=1024,
    swap_space=0.01,
    num_threads=1,  # two would wait awake for one another where tests share the cores
    speculative_config="off",
)
REQUESTS = [(5, 90), (9, 60), (2, 30)]  # tokens of a prompt, and of its answer


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many were captured whole, and replayed."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> None:
        done = getattr(CapturedPass, name)

        def count(self: CapturedPass, *arguments: Any) -> Generator[bool, None, bool]:
            is_done = yield from done(self, *arguments)
            counts[name] += is_done
            return bool(is_done)

        monkeypatch.setattr(CapturedPass, name, count)

    counted("capture")
    counted("replay")
    return counts


def talk(folder: Path, num_pages: int = 100, num_threads: int = 1) -> dict[int, list[Any]]:
    """Tokens and log-probabilities of three answers, of which the last begins later."""
    settings = SETTINGS.model_copy(update={"num_threads": num_threads})
    runner = Restricted(load_on_cpu(folder, settings), num_pages=num_pages, num_host_pages=60)
    server = Server(runner, settings)
    for counter, (prompt, answer) in enumerate(REQUESTS):
        sampling = SamplingParams(answer, seed=counter, ignore_eos=True, num_logprobs=3)
        server.ask(counter, list(range(3 + counter, 3 + counter + prompt)), sampling)
        for _ in range(8):
            server.turn()
    server.run()
    runner.close()
    return {counter: [server.tokens[counter], server.logprobs[counter]] for counter in range(3)}


@pytest.mark.parametrize(
    "family", ["llama 3.2", "qwen2 with windows", "qwen3", "gemma 2", "exaone 4 32b", "smollm 3"]
)
@pytest.mark.parametrize("num_pages", [100, 32])
def test_a_replayed_pass_is_the_pass(
    family: str,
    num_pages: int,
    tmp_path: Path,
    passes: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "model"
    FAMILIES[family].save(random_model(family), folder)
    found = talk(folder, num_pages)
    assert passes["capture"] and passes["replay"] > 20
    monkeypatch.setattr(CapturedPasses, "can", lambda self, num_rows: False)
    seen = passes.copy()
    assert talk(folder, num_pages) == found
    assert passes == seen


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("family", ["llama 3.2", "qwen3", "exaone 4 32b"])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_team_replays_what_one_thread_does(
    family: str, num_threads: int, tmp_path: Path, passes: Counter[str]
) -> None:
    folder = tmp_path / "model"
    FAMILIES[family].save(random_model(family), folder)
    alone = talk(folder)
    passes.clear()
    assert talk(folder, num_threads=num_threads) == alone
    assert passes["replay"] > 20


@pytest.mark.usefixtures("threads")
def test_a_team_that_has_changed_since_the_model_was_loaded_does_all(
    tmp_path: Path, passes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(make_model("llama"), tmp_path / "model")
    alone = talk(folder)
    monkeypatch.setattr(captured_pass, "num_threads", lambda: 2)
    passes.clear()
    assert talk(folder, num_threads=3) == alone
    assert passes["replay"] > 20


def test_one_whose_tables_have_no_room_is_captured_anew(
    tmp_path: Path, passes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(make_model("llama"), tmp_path / "model")
    roomy = talk(folder), passes["capture"]
    monkeypatch.setattr(row_attention, "MORE_ROOM", 0)
    passes.clear()
    assert talk(folder) == roomy[0]
    assert passes["capture"] > roomy[1]


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss"])
def test_what_torch_computes_a_part_of_is_not_captured(
    variant: str, tmp_path: Path, passes: Counter[str]
) -> None:
    talk(save_model(make_model(variant), tmp_path / "model"))
    assert passes == Counter(capture=0)


def test_in_float32_torch_multiplies_and_nothing_is_captured(
    tmp_path: Path, passes: Counter[str]
) -> None:
    folder = save_model(make_model("llama"), tmp_path / "model")
    settings = SETTINGS.model_copy(update={"dtype": "float32"})
    server = Server(load_on_cpu(folder, settings), settings)
    server.ask(0, [3, 4, 5], SamplingParams(8, seed=0, ignore_eos=True))
    server.run()
    assert not passes


@pytest.mark.parametrize("width", [100, 768])
def test_a_replayed_norm_adds_up_as_a_norm_by_itself(width: int) -> None:
    """Compiled into a pass its sum would be made in another order, and one row of some hundred
    rounded to another number."""
    torch.manual_seed(0)
    team = team_of(1)
    for _ in range(2000):
        x, delta, weight, out = torch.randn(4, 1, width).bfloat16()
        alone = x.clone()
        tensors = alone, delta, weight, out
        with noted() as calls:
            add_norm(*map(Tensor.data_ptr, tensors), 1, width, 1.0, 1e-5, BFLOAT16, BFLOAT16)
        of_itself = out.clone()
        alone.copy_(x)
        calls_NS = packed(calls)
        work = np.array((calls_NS.ctypes.data, len(calls), team.ctypes.data))
        replay(work.ctypes.data, replay_parts.address)
        assert torch.equal(out, of_itself)
