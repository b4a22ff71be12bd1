"""Where Python keeps the bytecode of what a server imports."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import MutableMapping

from common.host import cache_folder

LARGEST = "torch"  # of what is imported: a thousand modules


def keep_bytecode(env: MutableMapping[str, str]) -> None:
    """Have this process and its children keep bytecode in our cache, if Python would keep none.

    Else every start compiles what it imports: that of torch took three times as long.
    """
    if sys.pycache_prefix is not None or _is_kept(LARGEST):
        return
    sys.pycache_prefix = env["PYTHONPYCACHEPREFIX"] = str(cache_folder("bytecode", env))
    sys.dont_write_bytecode = False
    env.pop("PYTHONDONTWRITEBYTECODE", None)


def _is_kept(package: str) -> bool:
    """Whether it lies beside the sources, or will after the first import."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return True
    return not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK)
