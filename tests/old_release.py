"""The release before, as far as its links show it: it speaks protocol version 6 and nothing else.

tests/unit/common/link/test_previous.py holds it to frames that the code of that release has
written. `python -m tests.old_release SERVICE …` runs a service that speaks so.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from common.errors import MalformedMessage
from common.link import codec
from common.link.shapes import Shapes
from common.messages.address import Address
from common.messages.control import Load, ModelCard, StepReport, WorkerAlive
from common.messages.failure import Usage
from common.messages.generate import Generate
from common.messages.previous import OLD_FORMS, OldForm, WorkerAlive6, kept
from common.messages.tokenize import Tokenize, TokenizeQuery
from common.messages.tokens import DetokenizeQuery, TokensGenerated

VERSION = 6


@dataclass(frozen=True, slots=True)
class Address6:
    """Nothing said which version the owner of an inbox speaks."""

    endpoint: str
    instance_id: str


def refuse_others(alive: WorkerAlive6) -> Any:
    """Take the heartbeat of a worker of the same version; routers refused all others."""
    if alive.protocol_version != VERSION:
        raise MalformedMessage(f"a worker of version {alive.protocol_version}")
    return OLD_FORMS[WorkerAlive].newer(alive)


NEW_FIELDS: dict[type, tuple[str, ...]] = {
    DetokenizeQuery: ("vocab_size",),
    Generate: ("client", "prediction_ids"),
    ModelCard: ("vocabulary", "loading"),
    Tokenize: ("client", "prediction"),
    Load: ("signals",),
    StepReport: ("num_draft_tokens", "num_accepted_tokens", "drafts"),
    TokenizeQuery: ("limits",),
    TokensGenerated: ("drafted_rows", "num_accepted", "num_rejected"),
    Usage: ("accepted_tokens", "rejected_tokens"),
    WorkerAlive: ("trouble", "experts"),
}
"""At the end of records, with defaults: no difference to a reader, but this release had none."""


def before(kind: type) -> OldForm:
    """A record as it was without its new fields."""
    hints = get_type_hints(kind, localns={"array": Sequence}, include_extras=True)
    old = [f for f in fields(kind) if f.name not in NEW_FIELDS[kind]]
    columns = [
        (f.name, hints[f.name], field(default=f.default, default_factory=f.default_factory))
        for f in old
    ]
    form = make_dataclass(f"{kind.__name__}6", columns, frozen=True, slots=True)
    return OldForm(form, lambda new: form(**kept(new, form)), lambda was: kind(**kept(was, kind)))


SPOKEN = {
    VERSION: Shapes(
        {
            **OLD_FORMS,
            **{kind: before(kind) for kind in NEW_FIELDS},
            WorkerAlive: OLD_FORMS[WorkerAlive]._replace(newer=refuse_others),
            Address: OldForm(
                Address6,
                older=lambda new: Address6(new.endpoint, new.instance_id),
                newer=lambda old: Address(old.endpoint, old.instance_id),
            ),
        }
    )
}


if __name__ == "__main__":
    codec.SPOKEN.clear()
    codec.SPOKEN.update(SPOKEN)
    service = sys.argv.pop(1)
    runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)
