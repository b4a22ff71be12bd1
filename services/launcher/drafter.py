"""Finds the model that is to draft, as the one that it drafts for is found."""

from __future__ import annotations

import json
from dataclasses import replace

from common.config import ModelSettings
from common.errors import ModelError
from services.launcher.model import find_model
from services.launcher.plan import Plan


def with_drafter(plan: Plan) -> Plan:
    """Name the drafter's complete local folder in the settings; ModelError if there is none."""
    try:
        written = json.loads(plan.value("compute", "speculative_config"))
        wanted = ModelSettings.model_validate({"path": written["model"]})
    except (ValueError, TypeError, KeyError):
        return plan  # no model is named; compute reports a mistake
    try:
        found = find_model(wanted, with_weights=plan.needs_weights)
    except ModelError as error:
        raise ModelError(f"--speculative-config: {error}") from error
    config = json.dumps({**written, "model": found.path})
    compute = {**plan.tables.get("compute", {}), "speculative_config": config}
    return replace(plan, tables={**plan.tables, "compute": compute})
