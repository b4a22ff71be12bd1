"""What this process may have of its host."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.host import (
    MAX_OPEN_FILES,
    is_fast_at_bf16,
    max_open_files,
    raise_open_files_limit,
)


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """The limit that most shells set; yields the one up to which a process may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, most), hard))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_low_limit_of_open_files_is_raised_as_far_as_it_may(few_open_files: int) -> None:
    assert max_open_files() == min(1024, few_open_files)
    raise_open_files_limit()
    assert max_open_files() == few_open_files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu sse2 avx avx2 fma\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu sse2 avx\n", False),
        ("Features\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_processors_with_kernels_for_bfloat16_are_known_by_their_flags(
    text: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert is_fast_at_bf16() == expected
