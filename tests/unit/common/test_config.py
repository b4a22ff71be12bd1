"""Settings come from a file and the environment, and mistakes in them are named plainly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from common.config import (
    LinkSettings,
    ModelSettings,
    ServiceConfig,
    Settings,
    TelemetrySettings,
    WrittenSettings,
    load,
)
from common.errors import ConfigError


class RouterLike(Settings):
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    RENAMED: ClassVar[Mapping[str, tuple[str, str]]] = {"listen_port": ("port", "9.0.0")}


def load_router(
    tmp_path: Path, text: str = "", env: dict[str, str] | None = None
) -> ServiceConfig[RouterLike]:
    path = tmp_path / "slipstream.toml"
    path.write_text(text)
    return load(RouterLike, "router", path, env or {})


def complaint(tmp_path: Path, text: str = "", env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_router(tmp_path, text, env)
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_without_file_and_environment_the_defaults_hold() -> None:
    config = load(RouterLike, "router", None, {})
    assert config.own == RouterLike()
    assert config.links == LinkSettings()
    assert config.telemetry == TelemetrySettings()
    assert config.name == "router"


def test_a_service_reads_the_shared_tables_and_its_own(tmp_path: Path) -> None:
    text = '[router]\nport = 9000\n[links]\nrouters = ["ipc://a", "ipc://b"]\n[compute]\nany = 1\n'
    config = load_router(tmp_path, text)
    assert config.own.port == 9000
    assert config.links.routers == ("ipc://a", "ipc://b")


def test_a_setting_under_its_old_name_counts_and_is_reported_with_its_new_name(
    tmp_path: Path,
) -> None:
    config = load_router(tmp_path, "[router]\nlisten_port = 9000\n")
    place = f"{tmp_path}/slipstream.toml: [router]"
    assert config.own.port == 9000
    assert list(config.renamed) == [(f"{place} listen_port", f"{place} port", "9.0.0")]
    env = {"SLIPSTREAM_ROUTER__LISTEN_PORT": "9001"}
    config = load_router(tmp_path, "[router]\nport = 9000\n", env)
    assert config.own.port == 9001
    (renamed,) = config.renamed
    assert renamed.setting == "SLIPSTREAM_ROUTER__LISTEN_PORT"
    assert renamed.new_name == "SLIPSTREAM_ROUTER__PORT"


def test_a_later_source_counts_whichever_of_its_names_a_setting_has(tmp_path: Path) -> None:
    env = {"SLIPSTREAM_ROUTER__PORT": "9001"}
    assert load_router(tmp_path, "[router]\nlisten_port = 9000\n", env).own.port == 9001


@pytest.mark.parametrize("lines", ["port = 1\nlisten_port = 2", "listen_port = 2\nport = 1"])
def test_in_one_place_the_new_name_counts(tmp_path: Path, lines: str) -> None:
    config = load_router(tmp_path, f"[router]\n{lines}\n")
    assert config.own.port == 1
    assert len(config.renamed) == 1


def test_a_bad_value_is_named_where_it_stands_under_the_old_name(tmp_path: Path) -> None:
    said = complaint(tmp_path, env={"SLIPSTREAM_ROUTER__LISTEN_PORT": "many"})
    assert said.startswith("SLIPSTREAM_ROUTER__LISTEN_PORT: should be a valid integer")


def test_the_environment_goes_over_the_file_and_an_override_over_both(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[router]\nport = 1\nhost = "file"\n')
    env = {"SLIPSTREAM_ROUTER__PORT": "2", "HOME": "/nowhere"}
    assert load(RouterLike, "router", path, env).own == RouterLike(host="file", port=2)
    written = WrittenSettings({"router": RouterLike}, path, env, {"router": {"port": 3}})
    assert written.validated(RouterLike, "router").port == 3


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[router]\nport = 1\n")
    assert load(RouterLike, "router", None, {"SLIPSTREAM_CONFIG": str(path)}).own.port == 1


def test_a_tuple_is_written_with_commas_in_the_environment(tmp_path: Path) -> None:
    config = load_router(tmp_path, env={"SLIPSTREAM_ROUTER__API_KEYS": "one, two,"})
    assert config.own.api_keys == ("one", "two")


def test_inherited_descriptors_are_read_from_the_environment(tmp_path: Path) -> None:
    env = {"SLIPSTREAM_LISTEN_FD": "5", "SLIPSTREAM_LAUNCHER_FD": "6"}
    config = load_router(tmp_path, env=env)
    assert (config.listen_fd, config.launcher_fd) == (5, 6)


def test_settings_cannot_be_changed_afterwards(tmp_path: Path) -> None:
    config = load_router(tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        config.own.port = 1


def test_an_unknown_key_names_the_file_the_table_and_the_near_match(tmp_path: Path) -> None:
    said = complaint(tmp_path, "[router]\nprot = 1\n")
    assert said == "slipstream.toml: [router] prot: no such setting; did you mean port?"


def test_an_unknown_variable_names_itself_and_the_near_match(tmp_path: Path) -> None:
    said = complaint(tmp_path, env={"SLIPSTREAM_LINKS__ROUTER": "x"})
    assert said == "SLIPSTREAM_LINKS__ROUTER: no such setting; did you mean routers?"


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("SLIPSTREAM_PORT", "SLIPSTREAM_PORT: not a setting; they are named"),
        ("SLIPSTREAM_ROUTR__PORT", "SLIPSTREAM_ROUTR__PORT: no table [routr]; did you mean router"),
    ],
)
def test_a_variable_of_no_table_is_an_error(tmp_path: Path, variable: str, said: str) -> None:
    assert complaint(tmp_path, env={variable: "1"}).startswith(said)


def test_another_services_variables_are_none_of_our_business(tmp_path: Path) -> None:
    assert load_router(tmp_path, env={"SLIPSTREAM_COMPUTE__DEVICE": "cpu"}).own == RouterLike()


def test_a_bad_value_is_one_line_without_the_validators_jargon(tmp_path: Path) -> None:
    said = complaint(tmp_path, '[router]\nport = "many"\n')
    assert said == (
        "slipstream.toml: [router] port: should be a valid integer, "
        "unable to parse string as an integer (it is 'many')"
    )


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    said = complaint(tmp_path, "[router]\nport = 1.5\nhots = 1\n[model]\npaht = 2\n")
    assert len(said.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[rooter]\n", "slipstream.toml: [rooter]: no such table; did you mean router?"),
        ("port = 1\n", "slipstream.toml: port: stands below no table; put it into one of [mod"),
        ("[port]\n", "slipstream.toml: [port]: no such table"),
        ("router = 1\n", "slipstream.toml: router: is a table"),
        ("[router\n", "slipstream.toml: not valid TOML"),
    ],
)
def test_a_file_of_the_wrong_shape_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    assert complaint(tmp_path, text).startswith(said)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the settings file: No such file"):
        load(RouterLike, "router", tmp_path / "none.toml", {})


def test_a_model_has_no_empty_name(tmp_path: Path) -> None:
    said = complaint(tmp_path, '[model]\nserved_name = [""]\n')
    assert said.startswith("slipstream.toml: [model] served_name: String should have at least 1 ch")


def test_the_demo_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = load(RouterLike, "router", None, {}).model
    assert Path(model.path).is_absolute()
    assert model.path.endswith("models/demo")
    assert model.served_name == ("demo",)


@pytest.mark.parametrize(
    ("path", "served_name"),
    [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("/models/Qwen3-0.6B", "Qwen3-0.6B")],
)
def test_a_model_is_served_under_its_hub_id_or_its_folders_name(
    path: str, served_name: str
) -> None:
    env = {"SLIPSTREAM_MODEL__PATH": path}
    assert load(RouterLike, "router", None, env).model.served_name == (served_name,)


def test_a_model_may_be_served_under_several_names() -> None:
    env = {"SLIPSTREAM_MODEL__SERVED_NAME": "gpt-4o, gpt-4o-mini"}
    assert load(RouterLike, "router", None, env).model.served_name == ("gpt-4o", "gpt-4o-mini")


def test_the_shared_settings_are_exactly_these() -> None:
    """A change here is a change for every deployment: it goes into the changelog."""
    assert list(ModelSettings.model_fields) == ["path", "served_name", "revision"]
    assert list(LinkSettings.model_fields) == [
        "bind",
        "advertise",
        "routers",
        "run_dir",
        "local_dir",
        "max_message_bytes",
        "curve_dir",
        "make_keys",
        "insecure",
    ]
    assert list(TelemetrySettings.model_fields) == [
        "log_level",
        "log_format",
        "traces",
        "trace_sample_ratio",
    ]
