"""Where an inbox is and what it must be called, before any socket is opened."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.link.binding import expand, require_keys
from common.link.resolve import TcpPlace


def test_run_dir_and_name_are_filled_in() -> None:
    endpoint = expand("ipc://{run_dir}/{name}.sock", "/run/s", "compute-0")
    assert endpoint == "ipc:///run/s/compute-0.sock"


def test_without_a_run_dir_an_ipc_inbox_has_no_place() -> None:
    with pytest.raises(ConfigError, match="run_dir is empty"):
        expand("ipc://{run_dir}/{name}.sock", "", "compute-0")


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "a\0"])
def test_a_name_cannot_lead_out_of_the_run_dir(name: str) -> None:
    with pytest.raises(ConfigError, match="instance name"):
        expand("ipc://{run_dir}/{name}.sock", "/run/s", name)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.1", "::"])
def test_what_other_hosts_can_reach_needs_keys(host: str) -> None:
    with pytest.raises(ConfigError, match="slipstream keys DIR"):
        require_keys(TcpPlace(host, "5000"), None)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    require_keys(TcpPlace(host, "5000"), None)
