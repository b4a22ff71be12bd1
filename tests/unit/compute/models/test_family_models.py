"""The models that families are tested with have teeth: what a family does differently is heard."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.unit.compute.models.family_models import (
    ALL_PROMPTS,
    FAMILIES,
    answers,
    older_config,
    random_model,
    weights_of,
)

PARAMS = [pytest.param(name) for name in FAMILIES]
BITES = [
    pytest.param(name, field, id=f"{name}, {field}")
    for name, family in FAMILIES.items()
    for field in family.bites
]
SEES = re.compile("vision_tower|vision_model|multi_modal_projector")
CLEAR = 1e-3  # of logits' spread; the engine's differ by less than a tenth of it
HEARD = 1e-3  # ten times what the engine's logprobs may differ by


def logprobs_of(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        logits_TV = model(torch.tensor([ALL_PROMPTS[3]]), use_cache=False).logits[0]
    return logits_TV.log_softmax(-1)


@pytest.mark.parametrize("name", PARAMS)
def test_no_token_hangs_on_rounding(name: str) -> None:
    for answer in answers(name):
        first, second = answer.logits_CV.topk(2).values.unbind(-1)
        assert float(((first - second) / answer.logits_CV.std(-1)).min()) > CLEAR


@pytest.mark.parametrize(("name", "field"), BITES)
def test_a_field_of_the_config_is_heard(name: str, field: str) -> None:
    family, model = FAMILIES[name], random_model(name)
    changes: dict[str, Any] = {field: family.bites[field]}
    if field == "max_window_layers":
        changes["layer_types"] = None
    other = family.model(**changes)
    other.load_state_dict(model.state_dict())
    assert float((logprobs_of(model) - logprobs_of(other)).abs().max()) > HEARD


@pytest.mark.parametrize("name", PARAMS)
def test_every_norm_and_bias_is_heard(name: str) -> None:
    """Of each kind one whose values are those of a layer that forgets it: ones or zeros."""
    model = random_model(name)
    before = logprobs_of(model)
    kinds = {}
    for parameter_name, parameter in weights_of(model):
        kind = re.sub(r"\.\d+\.", ".N.", parameter_name)
        if kind.endswith(("bias", "norm.weight", "sinks")) and not SEES.search(kind):
            kinds.setdefault(kind, parameter)
    for kind, parameter in kinds.items():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(torch.full_like(kept, float(kept.mean().round())))
        heard = float((logprobs_of(model) - before).abs().max())
        with torch.no_grad():
            parameter.copy_(kept)
        assert heard > HEARD, kind


@pytest.mark.parametrize("name", PARAMS)
def test_transformers_hears_the_same_in_the_words_of_older_files(name: str) -> None:
    family = FAMILIES[name]
    config = family.config()
    older = older_config(config.to_dict(), family)
    assert "rope_parameters" not in older
    heard, said = type(config)(**older).to_dict(), config.to_dict()
    if "text_config" in said:
        heard, said = heard["text_config"], said["text_config"]
    for rope in (heard["rope_parameters"], *heard["rope_parameters"].values()):
        if isinstance(rope, dict):
            rope.pop("type", None)
    own = {"dtype", "torch_dtype", "_sliding_window_pattern", *family.older}
    assert {field: heard[field] for field in said.keys() - own} == {
        field: said[field] for field in said.keys() - own
    }
