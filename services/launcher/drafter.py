"""Finds the model that is to draft, as the one that it drafts for is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from common.config import ModelSettings
from common.errors import ModelError
from services.launcher.model import find_model
from services.launcher.plan import Plan


@dataclass(frozen=True, slots=True)
class NamedDrafter:
    """A folder that the settings name, which need not be here yet, and what is in it."""

    folder: Path
    is_head: bool  # no model of its own


def named_drafter(plan: Plan) -> NamedDrafter | None:
    """None where no model is named."""
    try:
        written = json.loads(plan.value("compute", "speculative_config"))
        folder = Path(written["model"]).expanduser()
        return NamedDrafter(folder, written.get("method", "draft_model") != "draft_model")
    except (ValueError, TypeError, KeyError):
        return None


def with_drafter(plan: Plan, inspect: Callable[[Plan], None] = lambda plan: None) -> Plan:
    """Name the drafter's complete local folder in the settings; ModelError if there is none.

    `inspect` is called with the plan before weights are downloaded, and after, and may raise.
    """
    try:
        written = json.loads(plan.value("compute", "speculative_config"))
        wanted = ModelSettings.model_validate({"path": written["model"]})
    except (ValueError, TypeError, KeyError):
        return plan  # no model is named; compute reports a mistake

    def naming(folder: str) -> Plan:
        config = json.dumps({**written, "model": folder})
        compute = {**plan.tables.get("compute", {}), "speculative_config": config}
        return replace(plan, tables={**plan.tables, "compute": compute})

    try:
        found = find_model(
            wanted,
            with_weights=plan.needs_weights,
            inspect=lambda folder: inspect(naming(str(folder))),
        )
    except ModelError as error:
        raise ModelError(f"--speculative-config: {error}") from error
    return naming(found.path)
