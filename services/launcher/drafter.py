"""Finds the model that is to draft, as the one that it drafts for is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from common.config import ModelSettings
from common.errors import ModelError
from common.speculative import SpeculativeSettings, read_speculative
from services.launcher.model import find_model
from services.launcher.plan import Plan


@dataclass(frozen=True, slots=True)
class NamedDrafter:
    """A folder that the settings name, which need not be here yet, and what is in it."""

    folder: Path
    is_head: bool  # no model of its own


def drafts_of(plan: Plan) -> SpeculativeSettings | None:
    """ConfigError for what is not understood."""
    return read_speculative(plan.value("compute", "speculative_config"))


def named_drafter(plan: Plan) -> NamedDrafter | None:
    """None where no model is named."""
    drafts = drafts_of(plan)
    if drafts is None or not drafts.model:
        return None
    return NamedDrafter(Path(drafts.model).expanduser(), drafts.is_head)


def with_drafter(
    plan: Plan,
    inspect: Callable[[Plan], None] = lambda plan: None,
    *,
    with_weights: bool = True,
) -> Plan:
    """Name the drafter's complete local folder in the settings; ModelError if there is none.

    `inspect` is called with the plan before weights are downloaded, and after, and may raise.
    """
    drafts = drafts_of(plan)
    if drafts is None or not drafts.model:
        return plan
    written = json.loads(plan.value("compute", "speculative_config"))
    wanted = ModelSettings.model_validate({"path": drafts.model, "revision": drafts.revision})

    def naming(folder: str) -> Plan:
        config = json.dumps({**written, "model": folder})
        compute = {**plan.tables.get("compute", {}), "speculative_config": config}
        return replace(plan, tables={**plan.tables, "compute": compute})

    try:
        found = find_model(
            wanted,
            with_weights=with_weights and plan.needs_weights,
            inspect=lambda folder: inspect(naming(str(folder))),
        )
    except ModelError as error:
        raise ModelError(f"--speculative-config: {error}") from error
    return naming(found.path)
