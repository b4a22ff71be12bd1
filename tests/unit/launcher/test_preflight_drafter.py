"""A drafter that cannot draft is refused before weights are downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def heads(name: str, **changes: Any) -> Callable[[Path], str]:
    """A folder of what drafts, all of it but the weights."""

    def made(folder: Path) -> str:
        small = folder / "small"
        small.mkdir()
        (small / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        named = {} if name == "mtp" else {"model": str(small)}
        return json.dumps({"method": name, "num_speculative_tokens": 3, **named})

    return made


LAST = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (heads("mtp"), "mtp: models of this family have no layers that predict further tokens"),
        (heads("draft_model", vocab_size=50), "small has another vocabulary .* 50 ids where there"),
        (heads("eagle", **LAST), "is no head of the method eagle; is it one of eagle3"),
        (heads("eagle"), "num_hidden_layers is 4; heads of one layer are supported"),
        (heads("eagle3", **LAST, vocab_size=50), "vocab_size is 50, and 1000 in the model that"),
        (heads("eagle3", **LAST, hidden_size=32), "hidden_size is 32, and 64 in the model that"),
        (heads("eagle3", **LAST, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (heads("eagle3", **LAST, norm_output=True), "norm_output 'True' is not supported"),
        (
            heads("eagle3", **LAST, **{IDS: [1, 2, 5]}),
            r"sees the layers \[1, 2, 5\], and the model",
        ),
        (heads("eagle3", **LAST, **{IDS: [1, 2, None]}), f"{IDS} .* a list of numbers of layers"),
        (heads("medusa"), "medusa_num_heads has to be from 1 to 16, not None"),
        (heads("medusa", medusa_num_heads=2), "there are 2 heads, .* lower num_speculative_tokens"),
    ],
)
def test_a_drafter_of_another_model_is_refused_before_weights_are_downloaded(
    make: Callable[[Path], str], says: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^compute.speculative_config: .*{says}"):
        inspect(plan_of(make(folder), load_format="dummy"), PC, folder)


def test_next_token_layers_that_a_model_came_without_are_not_looked_for_in_its_weights(
    folder: Path,
) -> None:
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    deepseek = {**CONFIG, **sizes, "architectures": ["DeepseekV3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(deepseek))
    with pytest.raises(ConfigError, match="mtp: config.json: num_nextn_predict_layers is 0"):
        inspect(plan_of('{"method": "mtp"}'), PC, folder)
    (folder / "config.json").write_text(json.dumps({**deepseek, "num_nextn_predict_layers": 1}))
    inspect(plan_of('{"method": "mtp"}', tensor_parallel_size=2), SERVER, folder)


def test_a_head_that_sees_what_the_last_layer_makes_drafts_on_any_device(folder: Path) -> None:
    plan = plan_of(heads("eagle3", **LAST, **{IDS: [1, 2, 4]})(folder), load_format="dummy")
    for machine in (PC, SERVER):
        inspect(plan, machine, folder)


def test_a_drafter_whose_tokens_are_others_is_refused_before_weights_are_downloaded(
    folder: Path,
) -> None:
    plan = plan_of(heads("draft_model")(folder), load_format="dummy")
    for place, text in ((folder, "a"), (folder / "small", "b")):
        vocabulary = {"model": {"vocab": {text: 0}}}
        (place / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ConfigError, match="token 0 is 'b' where it is 'a'. Take a drafter of the"):
        inspect(plan, PC, folder)


def test_a_drafter_that_is_quantized_in_another_way_is_refused(folder: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    plan = plan_of(
        heads("draft_model", **quantized)(folder), load_format="dummy", quantization="int8"
    )
    with pytest.raises(ConfigError, match="compute.quantization is int8, .* of .*/small are quant"):
        inspect(plan, PC, folder)


def test_a_model_that_makes_embeddings_has_no_use_for_a_drafter(folder: Path) -> None:
    modules = [{"type": f"models.{name}", "path": name} for name in ("Transformer", "Pooling")]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    inspect(plan_of(heads("eagle", hidden_size=32)(folder), load_format="dummy"), PC, folder)


def test_on_gpus_ranks_are_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match="-size 3: on GPUs .* a power of two, such as 2$"):
        check_ranks(plan_of("auto", tensor_parallel_size=3), "cuda", num_gpus=4)
    check_ranks(plan_of("auto", tensor_parallel_size=3), "cpu", num_gpus=0)
    check_ranks(plan_of("auto", tensor_parallel_size=4), "cuda", num_gpus=4)
