"""Which of the model's states a head sees, as published folders say it."""

from __future__ import annotations

import pytest

from common.errors import ModelError
from common.head_folder import eagle3_layers

NAME = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "num_layers", "layers"),
    [
        ({}, 32, (2, 16, 29)),  # those of the authors say nothing
        ({NAME: [], "eagle_config": {NAME: None}}, 36, (2, 18, 33)),
        ({NAME: [1, 23, 44]}, 48, (1, 23, 44)),  # speculators
        ({"eagle_config": {NAME: [1, 17, 33]}}, 36, (2, 18, 34)),  # SpecForge
        (
            {"eagle_config": {NAME: [1, 17, 32]}},
            36,
            (2, 18, 33),
        ),  # gpt-oss-120b-Eagle3-long-context
        ({"eagle_config": {NAME: [24, 30, 36]}}, 36, (24, 30, 36)),  # gpt-oss-120b-Eagle3-v3
        ({NAME: [2, 4, 6], "eagle_config": {NAME: [1, 3, 5]}}, 8, (2, 4, 6)),
    ],
)
def test_layers_are_counted_as_whoever_wrote_them_counts(
    config: dict[str, object], num_layers: int, layers: tuple[int, ...]
) -> None:
    assert eagle3_layers(config, num_layers) == layers


@pytest.mark.parametrize("numbers", [[2, 18, 37], [2, 18], [2, 46, 91, 93]])
def test_other_than_three_layers_of_the_model_are_refused(numbers: list[int]) -> None:
    with pytest.raises(ModelError, match=f"the head sees the layers .*{numbers[-1]}.*, and the mo"):
        eagle3_layers({NAME: numbers}, 36)
