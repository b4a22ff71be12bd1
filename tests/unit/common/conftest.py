"""Hypothesis without deadlines: a busy machine makes no test fail."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
