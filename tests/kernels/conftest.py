"""Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where this run's kernels are."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def lean_interpreter(device: torch.device) -> Iterator[None]:
    """Triton's interpreter without three things that it does for nothing: half of its time.

    It patches `triton.language` for each launch and again for each call of a device function; here
    once for each function, for good. It looks for overflows of every integer operation, and drops
    what it found unless it debugs. It builds a table of all dtypes to look up one.
    """
    if device.type == "cuda":
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    np_dtype_of, known = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype_of(dtype)
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", functools.cache(interpreter._patch_lang))
        patch.setattr(interpreter._LangPatchScope, "restore", lambda scope: None)
        options = replace(builder.options, sanitize_overflow=builder.options.debug)
        patch.setattr(builder, "options", options)
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        yield
