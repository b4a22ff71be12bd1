"""Spans by a number, as tests write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from services.compute.kernels.step.span import AttentionSpan

Sizes: TypeAlias = Sequence[int | AttentionSpan]


def span_of(size: int | AttentionSpan) -> AttentionSpan:
    """A window of so many positions, or 0: all before a query; a span is one already."""
    return size if isinstance(size, AttentionSpan) else AttentionSpan.window(size)


def spans_of(sizes: Sizes) -> tuple[AttentionSpan, ...]:
    return tuple(map(span_of, sizes))
