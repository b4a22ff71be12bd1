"""What a GPU that is too small says, and what it goes without."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.compute.kernels.linear.skinny_matmul_config import fits_device
from services.compute.runner import model_loader
from services.compute.runner.cuda import load
from tests.kernels.host_stream import HostStream


@pytest.mark.parametrize(
    ("module", "part"),
    [(model_loader, "DummyWeights"), (load, "StepMachine"), (model_loader, "PagedCache")],
)
def test_too_little_memory_is_an_error_that_says_what_to_lower(
    module: ModuleType, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(CONFIG, encoding="utf-8")
    settings = ComputeSettings(
        device="cuda", dtype="float32", load_format="dummy", max_num_seqs=2, max_prefill_tokens=8
    )

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nand more")

    monkeypatch.setattr(module, part, fail)
    with pytest.raises(ConfigError, match=r"lower compute\.max_num_seqs.*allocate 1 GiB\.\)$"):
        load.load_on(tmp_path, settings, torch.device("cpu"), HostStream())


CONFIG = """{
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "eos_token_id": 2
}"""


@pytest.mark.parametrize(
    ("capability", "fits"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)],
)
def test_products_of_few_rows_run_where_their_shared_memory_is(
    capability: tuple[int, int], fits: bool
) -> None:
    assert fits_device(capability) is fits
