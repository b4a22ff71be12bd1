"""What a config.json asks for in vain, and what `auto` chose, is said in one line of the log."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.compute.config import ComputeSettings
from services.compute.runner.notices import log_notices

QWEN = {"architectures": ["Qwen2ForCausalLM"]}
FP8_CACHE = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
CHUNKS = {"dual_chunk_attention_config": {"chunk_size": 262144}}


def noticed(raw: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    with capture_logs() as logs:
        log_notices(
            {**QWEN, **raw}, ComputeSettings(**{"dtype": "float32"} | settings), torch.bfloat16
        )
    return [dict(line) for line in logs]


def test_a_checkpoint_for_a_cache_in_fp8_says_which_option_gives_one() -> None:
    raw = {"quantization_config": FP8_CACHE}
    (line,) = noticed(raw)
    assert "--kv-cache-dtype fp8" in line["event"]
    assert noticed(raw, kv_cache_dtype="fp8") == noticed(raw, kv_cache_dtype="int8") == []


def test_dual_chunk_attention_says_where_texts_end() -> None:
    (line,) = noticed(CHUNKS)
    assert "dual_chunk_attention_config" in line["event"] and line["max_model_len"] == 262144


@pytest.mark.parametrize("raw", [{}, {"dual_chunk_attention_config": None}])
def test_of_other_models_nothing_is_said(raw: dict[str, Any]) -> None:
    assert noticed(raw) == []


def test_the_dtype_that_auto_chose_is_said() -> None:
    (line,) = noticed({}, dtype="auto")
    assert (line["event"], line["dtype"]) == ("dtype chosen", "bfloat16")
