"""Groups of processes, each with a GPU of its own."""

from __future__ import annotations

import pytest

import tests.kernels.conftest  # noqa: F401  (before anything imports triton: it may be interpreted)
from tests.gpus.groups import Groups


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    return Groups(tmp_path_factory.mktemp("groups"))
