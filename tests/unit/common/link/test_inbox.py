"""Where an inbox is and what it must be called, before any socket is opened."""

from __future__ import annotations

import pytest

from common.config import LinkSettings
from common.errors import ConfigError
from common.link.inbox import check_routers, expand, require_keys
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


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.1", "::"])
def test_what_other_hosts_can_reach_needs_keys(host: str, insecure: bool) -> None:
    with pytest.raises(ConfigError, match=r"other hosts.*slipstream keys DIR"):
        require_keys(TcpPlace(host, "5000"), None, insecure)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_loopback_needs_keys_too_unless_the_user_says_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"every user of this host.*slipstream keys DIR"):
        require_keys(TcpPlace(host, "5000"), None, False)
    require_keys(TcpPlace(host, "5000"), None, True)


ROUTERS = ("ipc://{run_dir}/router-0.sock", "tcp://127.0.0.1:5000", "tcp://routers.local:5000")


def test_routers_may_be_paths_places_and_names() -> None:
    check_routers(LinkSettings(routers=ROUTERS, run_dir="/run/s", insecure=True), None)


@pytest.mark.parametrize(
    "entry",
    [
        "router:5000",
        "tcp://router",
        "tcp://router:0",
        "tcp://router:*",
        "tcp://*:5000",
        "tcp://127.0.0.1:0",
        "tcp://two words:5000",
        "tcp://a..b:5000",
        f"tcp://{'a' * 64}:5000",
        "ipc://relative.sock",
        "ipc:///" + "a" * 107,
        "",
    ],
)
def test_a_routers_entry_that_no_message_can_reach_is_a_mistake_in_the_settings(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"^\[links\] routers: .* is no inbox"):
        settings = LinkSettings(routers=(*ROUTERS, entry), run_dir="/run/s", insecure=True)
        check_routers(settings, None)


def test_a_router_of_another_host_needs_keys() -> None:
    settings = LinkSettings(routers=("tcp://10.0.0.1:5000",))
    with pytest.raises(ConfigError, match=r"^\[links\] routers: tcp://10.0.0.1:5000 .* keys"):
        check_routers(settings, None)


def test_a_routers_entry_in_the_run_dir_needs_one() -> None:
    with pytest.raises(ConfigError, match="run_dir is empty"):
        check_routers(LinkSettings(routers=ROUTERS), None)
