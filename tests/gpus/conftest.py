"""Groups of processes, each with a GPU of its own."""

from __future__ import annotations

import pytest

from tests.gpus.groups import Groups


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    return Groups(tmp_path_factory.mktemp("groups"))
