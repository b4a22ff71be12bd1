"""What `auto` chose, and what config.json asks for in vain, said in the log of a model's start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
import torch

from common.architectures import language_fields
from common.quantization import has_fp8_cache
from common.sizes import dual_chunk_limit
from services.compute.config import ComputeSettings


def log_notices(raw: Mapping[str, Any], settings: ComputeSettings, dtype: torch.dtype) -> None:
    log = structlog.get_logger()
    if settings.dtype == "auto":
        log.info("dtype chosen", dtype=str(dtype).removeprefix("torch."))
    if has_fp8_cache(raw) and settings.kv_cache_dtype == "auto":
        log.warning(
            "the checkpoint was made for a KV cache in FP8, which is not the default: "
            "--kv-cache-dtype fp8 gives it one, in half the memory"
        )
    if limit := dual_chunk_limit(language_fields(raw)):
        log.warning(
            "dual_chunk_attention_config is not supported: texts end where it would matter",
            max_model_len=limit,
        )
