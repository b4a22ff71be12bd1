"""Spans by a number, as tests write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from services.compute.kernels.span import Span

Sizes: TypeAlias = Sequence[int | Span]


def span_of(size: int | Span) -> Span:
    """A window of so many positions, or 0: all before a query; a span is one already."""
    return size if isinstance(size, Span) else Span.window(size)


def spans_of(sizes: Sizes) -> tuple[Span, ...]:
    return tuple(map(span_of, sizes))
