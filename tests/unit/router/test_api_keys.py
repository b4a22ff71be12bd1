"""API keys: of the settings and of a file that may change under way."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import structlog

from common.errors import ConfigError
from services.router.admission import Client, ClientLimits
from services.router.api_keys import ApiKeys, bearer

TWO_KEYS = f"""
[[key]]
name = "team-a"
key = "sk-team-a-1"
max_in_flight = 2

[[key]]
name = "team-b"
sha256 = "{hashlib.sha256(b"sk-team-b-1").hexdigest()}"
tokens_per_minute = 1000
"""


def _write(path: Path, text: str, at_s: int) -> None:
    """Write as editors do, with a time of change that differs from the one before."""
    path.write_text(text)
    os.utime(path, (at_s, at_s))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    _write(path, TWO_KEYS, 1)
    return path


def test_without_keys_everybody_may_ask() -> None:
    assert ApiKeys(()).client("", "1.2.3.4") == Client("1.2.3.4")


def test_each_key_is_a_client_of_its_own() -> None:
    keys = ApiKeys(("first", "second"))
    assert keys.client("second", "1.2.3.4").name == "key-1"
    assert keys.client("first", "1.2.3.4").name == "key-0"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer third", "first", "Basic first", "Bearer \udcff"]
)
def test_anything_but_a_key_is_nobody(header: str) -> None:
    assert ApiKeys(("first", "second")).client(bearer(header), "1.2.3.4") is None


def test_metrics_are_for_clients_and_for_the_scraper_alone() -> None:
    assert ApiKeys(()).may_observe("")
    for keys in (ApiKeys(("first",)), ApiKeys(("first",), metrics_token="scraper")):
        assert keys.may_observe("first")
        assert not keys.may_observe("") and not keys.may_observe("scrape")
    assert keys.may_observe("scraper") and keys.client("scraper", "1.2.3.4") is None
    without = ApiKeys((), metrics_token="scraper")
    assert without.may_observe("scraper") and not without.may_observe("")
    assert without.client("", "1.2.3.4") == Client("1.2.3.4")


def test_the_name_of_the_scheme_is_written_in_any_case() -> None:
    assert bearer("bearer first") == bearer("BEARER  first ") == "first"


def test_keys_of_a_file_have_names_and_limits(file: Path) -> None:
    keys = ApiKeys((), str(file))
    assert keys.client("sk-team-a-1", "") == Client("team-a", ClientLimits(max_in_flight=2))
    assert keys.client("sk-team-b-1", "") == Client("team-b", ClientLimits(tokens_per_minute=1000))


def test_keys_of_the_settings_hold_beside_those_of_the_file(file: Path) -> None:
    assert ApiKeys(("first",), str(file)).client("first", "").name == "key-0"


def test_a_changed_file_takes_effect_without_a_restart(file: Path) -> None:
    keys = ApiKeys((), str(file))
    _write(file, '[[key]]\nname = "team-c"\nkey = "sk-team-c-1"\n', 2)
    keys.reload()
    assert keys.client("sk-team-c-1", "").name == "team-c"
    assert keys.client("sk-team-a-1", "") is None


@pytest.mark.parametrize("text", ["[[key]", '[[key]]\nname = "x"\n', "key = 3", "\x00"])
def test_a_mistake_in_a_changed_file_leaves_the_keys_as_they_were(file: Path, text: str) -> None:
    keys = ApiKeys((), str(file))
    _write(file, text, 2)
    with structlog.testing.capture_logs() as logs:
        keys.reload()
        keys.reload()
    assert [log["log_level"] for log in logs] == ["error"]
    assert keys.client("sk-team-a-1", "").name == "team-a"


def test_a_file_that_goes_away_leaves_the_keys_and_may_come_back(file: Path) -> None:
    keys = ApiKeys((), str(file))
    file.unlink()
    with structlog.testing.capture_logs() as logs:
        keys.reload()
        keys.reload()
    assert len(logs) == 1
    assert keys.client("sk-team-a-1", "").name == "team-a"
    _write(file, '[[key]]\nname = "team-c"\nkey = "sk-team-c-1"\n', 3)
    keys.reload()
    assert keys.client("sk-team-c-1", "").name == "team-c"


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("")
    assert ApiKeys((), str(path)).client("", "1.2.3.4") is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[[key]]\nname = "a b"\nkey = "sk-secret-1"\n', "name"),
        ('[[key]]\nname = "a"\nkey = "short"\n', "key"),
        ('[[key]]\nname = "a"\n', "either key or sha256"),
        ('[[key]]\nname = "a"\nkey = "sk-secret-1"\nlimit = 3\n', "limit"),
        ('[[key]]\nname = "a"\nkey = "sk-secret-1"\nrequests_per_s = nan\n', "requests_per_s"),
        ('[[key]]\nname = "a"\nkey = "sk-secret-1"\n' * 2, "two keys"),
    ],
)
def test_a_wrong_file_stops_the_start_and_shows_no_key(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named) as caught:
        ApiKeys((), str(path))
    assert "sk-secret-1" not in str(caught.value)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys((), str(tmp_path / "none.toml"))
