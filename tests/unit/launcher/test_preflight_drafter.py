"""A drafter that cannot draft is refused before weights are downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, ModelError
from services.launcher.plan import Counts, Plan, make_plan
from services.launcher.preflight import Gpu, Machine, check, check_ranks, inspect

GIB = 1 << 30
PC = Machine(host_bytes=64 * GIB, fast_bf16=True, why_no_gpu="this machine shows no NVIDIA GPU")
SERVER = Machine(host_bytes=64 * GIB, fast_bf16=True, gpus=(Gpu(24 * GIB, GIB),) * 4)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def plan_of(config: str, **compute: Any) -> Plan:
    return make_plan(None, {}, {"compute": {"speculative_config": config, **compute}}, Counts())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("config", "compute", "machine", "says"),
    [
        ('{"method": "lookahead"}', {}, PC, "method: Input should be"),
        ('{"method": "mtp"}', {}, PC, "mtp: config.json: num_nextn_predict_layers is 0"),
        ('{"model": "m"}', {"pipeline_parallel_size": 2}, PC, "say num_speculative_tokens"),
        ('{"model": "m"}', {"pipeline_parallel_size": 2}, SERVER, "in stages on GPUs yet"),
        ('{"model": "m"}', {"prefill_context_parallel_size": 2}, SERVER, "share the tokens of pr"),
        ('{"model": "m", "acceptance": "rejection"}', {}, SERVER, "to be compared on the CPU"),
    ],
)
def test_what_cannot_draft_is_refused(
    config: str, compute: dict[str, Any], machine: Machine, says: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^(compute.|--)speculative.config: .*{says}"):
        check(plan_of(config, **compute), machine, folder)


def test_what_can_draft_passes(folder: Path) -> None:
    for config in ("auto", '{"method": "ngram"}', '{"model": "m", "num_speculative_tokens": 2}'):
        check(plan_of(config, pipeline_parallel_size=2), PC, folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_nextn_predict_layers": 1}))
    check(plan_of('{"method": "mtp"}', tensor_parallel_size=2), SERVER, folder)


def test_a_drafter_is_looked_for_before_weights(folder: Path) -> None:
    with pytest.raises(ModelError, match="--speculative-config: there is no folder ./nothing"):
        inspect(plan_of('{"model": "./nothing"}'), PC, folder)
    (folder / "small").mkdir()
    small = folder / "small" / "config.json"
    large = {"vocab_size": 250_000, "hidden_size": 100_000, "num_attention_heads": 1000}
    small.write_text(json.dumps(CONFIG | large))
    with pytest.raises(ConfigError, match="its drafter .* GiB, and 64.0 GiB are free"):
        inspect(plan_of(json.dumps({"model": str(folder / "small")})), PC, folder)
    small.write_text(json.dumps(CONFIG))
    inspect(plan_of(json.dumps({"model": str(folder / "small")})), PC, folder)  # without weights


def test_on_gpus_ranks_are_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match="-size 3: on GPUs .* a power of two, such as 2$"):
        check_ranks(plan_of("auto", tensor_parallel_size=3), "cuda", num_gpus=4)
    check_ranks(plan_of("auto", tensor_parallel_size=3), "cpu", num_gpus=0)
    check_ranks(plan_of("auto", tensor_parallel_size=4), "cuda", num_gpus=4)
