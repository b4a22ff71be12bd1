"""Measured step costs in a file, from one start to the next: one for each device and model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from common.host import cache_folder
from services.compute.speculative.step_costs import StepCosts

FORMAT = 3
"""Raised with every change after which steps take another time."""

_COSTS = TypeAdapter(StepCosts)


def file_of(about: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Where the costs are kept of what `about` describes: all on which they depend."""
    described = json.dumps({"format": FORMAT, **about}, sort_keys=True, default=str)
    digest = hashlib.blake2b(described.encode(), digest_size=12).hexdigest()
    return (folder or cache_folder("step-costs")) / f"{digest}.json"


def read(path: Path) -> StepCosts | None:
    """What was kept; None where there is nothing, or nothing of use."""
    try:
        costs = _COSTS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        structlog.get_logger().warning("kept step costs are not used", error=str(error))
        return None
    return costs if costs.num_rows and len(costs.num_rows) == len(costs.step_s) else None


def keep(path: Path, costs: StepCosts) -> None:
    """Replace the file at once; where that cannot be, the next start measures again."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(_COSTS.dump_json(costs))
        part.replace(path)
    except OSError as error:
        structlog.get_logger().warning("step costs are not kept", error=str(error))
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
