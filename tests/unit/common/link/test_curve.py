"""Keys of a deployment: made once, for their owner's eyes only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.link.curve import (
    SERVICES,
    Keys,
    create_keys,
    is_open_to_others,
    load_keys,
    make_missing_keys,
    service_of,
)


def test_every_service_gets_a_pair_and_the_deployment_one(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    paths = create_keys(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert {path.name for path in paths} == {
        f"{name}.{kind}"
        for name in ("server", "router", "tokenizer", "compute", "detokenizer")
        for kind in ("public", "secret")
    }


def test_a_service_loads_its_own_keys_and_all_public_ones(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    keys = load_keys(tmp_path / "keys", "compute")
    other = load_keys(tmp_path / "keys", "router")
    assert keys.server_secret == other.server_secret
    assert keys.client_secret != other.client_secret
    assert len(keys.clients) == 4
    assert keys.client_public in keys.clients
    assert keys.server_public not in keys.clients


def test_a_public_key_added_to_the_folder_is_let_in(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    (tmp_path / "keys" / "extra.public").write_bytes(b"k" * 40)
    assert b"k" * 40 in load_keys(tmp_path / "keys", "compute").clients


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"server\.public is there already"):
        create_keys(tmp_path / "keys")


def test_services_that_start_at_once_share_the_keys_that_one_of_them_makes(tmp_path: Path) -> None:
    def started(service: str) -> Keys:
        make_missing_keys(tmp_path / "keys")
        return load_keys(tmp_path / "keys", service)

    with ThreadPoolExecutor(len(SERVICES)) as pool:
        loaded = list(pool.map(started, SERVICES))
    assert len({keys.server_secret for keys in loaded}) == 1
    assert {keys.clients for keys in loaded} == {frozenset(keys.client_public for keys in loaded)}


def test_a_missing_key_says_how_to_make_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="slipstream keys DIR"):
        load_keys(tmp_path, "compute")


@pytest.mark.parametrize("content", [b"short", b" " * 40, b"\xff" * 40])
def test_a_broken_key_is_named(tmp_path: Path, content: bytes) -> None:
    create_keys(tmp_path / "keys")
    (tmp_path / "keys" / "router.public").write_bytes(content)
    with pytest.raises(ConfigError, match=r"router\.public holds no key"):
        load_keys(tmp_path / "keys", "compute")


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    (tmp_path / "keys" / "compute.secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(tmp_path / "keys", "compute")


def test_a_secret_of_root_may_be_lent_to_a_group_as_kubernetes_does() -> None:
    assert not is_open_to_others(0o440, owner=0, reader=10001)
    assert is_open_to_others(0o444, owner=0, reader=10001)
    assert is_open_to_others(0o460, owner=0, reader=10001)
    assert is_open_to_others(0o440, owner=10001, reader=10001)
    assert is_open_to_others(0o440, owner=0, reader=0)


def test_an_instances_keys_are_those_of_its_service() -> None:
    assert service_of("compute-0") == "compute"
    assert service_of("detokenizer") == "detokenizer"
    with pytest.raises(ConfigError, match="no keys for the instance name 'gpu-1'"):
        service_of("gpu-1")
