"""Settings: one TOML file and the environment, read once into frozen models.

The file overrides the defaults in the code, the environment (`SLIPSTREAM_<TABLE>__<FIELD>`) the
file, and the launcher's options both. This module knows no service: each keeps its settings beside
its code and passes their type to `load`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from common.errors import ConfigError, near
from common.gguf.file import model_name

PACKAGES = str(Path(__file__).resolve().parents[1])  # the folder of `common` and `services`
ENV_PREFIX = "SLIPSTREAM_"
CONFIG_VARIABLE = "SLIPSTREAM_CONFIG"  # path of the file, if no other is given
LAUNCHER_FD_VARIABLE = "SLIPSTREAM_LAUNCHER_FD"  # a pipe that closes when the launcher ends
LISTEN_FD_VARIABLE = "SLIPSTREAM_LISTEN_FD"  # the listening HTTP socket, for routers
_NO_SETTINGS = (CONFIG_VARIABLE, LAUNCHER_FD_VARIABLE, LISTEN_FD_VARIABLE, "SLIPSTREAM_API_KEY")
SERVICE_TABLES = ("router", "tokenizer", "compute", "detokenizer")
MAX_NUM_SEQS = 1 << 16  # more than any device holds: a typing error
MAX_STEP_TOKENS = 1 << 22
DEMO_MODEL = "models/demo"
DEMO_DRAFTER = "models/demo_draft"  # a fifth of its size, of the same vocabulary
GRACE = "seconds to end in after SIGTERM; what still runs then is ended"

Tables: TypeAlias = dict[str, dict[str, Any]]
"""Values as written, by table and field."""


class RenamedSetting(NamedTuple):
    """A setting that was given by its old name, and what to write instead."""

    setting: str
    new_name: str
    removed_in: str  # the release that no longer accepts the old name


class Settings(BaseModel):
    """A frozen table of settings; unknown keys are errors.

    A field that is a tuple may be given as one string with commas. `RENAMED` maps old names, which
    are accepted with a warning, to the new name and the release that no longer accepts the old one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    RENAMED: ClassVar[Mapping[str, tuple[str, str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _split_commas(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        split = dict(values)
        for name, field in cls.model_fields.items():
            value = split.get(name)
            if get_origin(field.annotation) is tuple and isinstance(value, str):
                split[name] = [item.strip() for item in value.split(",") if item.strip()]
        return split


class ModelSettings(Settings):
    """The `[model]` table: which model all services serve."""

    path: str = Field(
        DEMO_MODEL,
        description="a folder in Hugging Face's layout, the id of a model on its hub, which is "
        "downloaded, or a GGUF file (default: the embedded demo)",
    )
    served_name: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="what clients call it; of several names answers have the first "
        "(default: the hub id or the name of the folder or file)",
    )
    revision: str = Field("", description="a branch, tag or commit on the hub (default: main)")


class LinkSettings(Settings):
    """The `[links]` table: where inboxes are and how they are protected."""

    bind: str = Field(
        "ipc://{run_dir}/{name}.sock",
        description="the inbox; also tcp://ADDRESS:PORT, where port 0 picks a free one",
    )
    advertise: str = Field(
        "",
        description="how others reach it (default: where it is bound, or this host's address "
        "towards a router)",
    )
    routers: tuple[str, ...] = Field(
        (),
        description="inboxes of the routers; host names are resolved every second, and "
        "file:///PATH, which holds one inbox a line, is read again as often",
    )
    run_dir: str = Field(
        "",
        description="where inboxes and beacons are (default: a private folder for this run)",
    )
    local_dir: str = Field(
        "",
        description="a folder that the services of one host share: links over tcp between those "
        "take a shortcut through it, as ipc (default: none do)",
    )
    max_message_bytes: int = Field(64 << 20, description="size of one message")
    curve_dir: str = Field("", description="keys for links over tcp, made by slipstream keys")
    make_keys: bool = Field(
        False,
        description="make the keys in curve_dir if there are none; for services that share it",
    )
    insecure: bool = Field(
        False,
        description="links over tcp on loopback may do without keys; every user of the host can "
        "then read prompts and answer them",
    )


class TelemetrySettings(Settings):
    log_level: str = Field("info", description="debug, info, warning, error or critical")
    log_format: str = Field(
        "auto", description="console, json, or auto: console on a terminal and json in a pipe"
    )
    traces: str = Field("none", description="none, console, or the URL of an OTLP/HTTP collector")
    trace_sample_ratio: float = Field(
        1.0, ge=0.0, le=1.0, description="share of traces kept, of those that begin here"
    )


SHARED_SETTINGS: Mapping[str, type[Settings]] = {
    "model": ModelSettings,
    "links": LinkSettings,
    "telemetry": TelemetrySettings,
}
TABLES = (*SHARED_SETTINGS, *SERVICE_TABLES, "ray")
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class ServiceConfig(Generic[S]):
    """The settings of one service: the shared tables and its own.

    `name` is unique on its host (`compute-0`), `listen_fd` an inherited listening socket,
    `launcher_fd` a pipe that closes when the launcher ends. `model` is resolved: `served_name` is
    not empty, and the demo's path is where it is installed.
    """

    service: str
    name: str
    model: ModelSettings
    links: LinkSettings
    telemetry: TelemetrySettings
    own: S
    renamed: Sequence[RenamedSetting] = ()
    listen_fd: int | None = None
    launcher_fd: int | None = None


def load(
    settings_type: type[S],
    service: str,
    path: str | Path | None,
    env: Mapping[str, str],
    name: str = "",
) -> ServiceConfig[S]:
    """Read the settings of one service; ConfigError names all mistakes."""
    written = WrittenSettings({**SHARED_SETTINGS, service: settings_type}, path, env)
    config = ServiceConfig(
        service=service,
        name=name or service,
        model=resolved_model(written.validated(ModelSettings, "model")),
        links=written.validated(LinkSettings, "links"),
        telemetry=written.validated(TelemetrySettings, "telemetry"),
        own=written.validated(settings_type, service),
        renamed=written.renamed,
        listen_fd=inherited_fd(env, LISTEN_FD_VARIABLE),
        launcher_fd=inherited_fd(env, LAUNCHER_FD_VARIABLE),
    )
    written.check()
    return config


class WrittenSettings:
    """The values of file, environment and overrides by today's names, and where each stands."""

    def __init__(
        self,
        types: Mapping[str, type[Settings]],
        path: str | Path | None,
        env: Mapping[str, str],
        overrides: Tables | None = None,
    ) -> None:
        path = path or env.get(CONFIG_VARIABLE)
        self.tables: Tables = {}
        self.renamed: list[RenamedSetting] = []
        self._places: dict[tuple[str, str], str] = {}  # by table and field
        self._complaints: list[str] = []
        sources = {
            f"{path}: ": read_file(path) if path else {},
            "": read_environment(env),
            "option ": overrides or {},
        }
        for prefix, tables in sources.items():
            for table, values in tables.items():
                new_names = types[table].RENAMED if table in types else {}
                for field, value in values.items():
                    place = _place(prefix, table, field)
                    name, removed_in = new_names.get(field, (field, ""))
                    if removed_in:
                        new_place = _place(prefix, table, name)
                        self.renamed.append(RenamedSetting(place, new_place, removed_in))
                    if name == field or name not in values:
                        self.tables.setdefault(table, {})[name] = value
                        self._places[table, name] = place

    def validated(self, kind: type[S], table: str) -> S:
        """Return the settings of one table; the mistakes in it are for `check` to raise."""
        try:
            return kind.model_validate(self.tables.get(table, {}))
        except ValidationError as error:
            for problem in error.errors(include_url=False, include_context=False):
                field = str(problem["loc"][0]) if problem["loc"] else ""
                place = self._places.get((table, field), f"[{table}] {field}".rstrip())
                complaint = complaint_about(problem)
                if problem["type"] == "extra_forbidden":
                    complaint = f"no such setting{_near(field, kind.model_fields)}"
                self._complaints.append(f"{place}: {complaint}")
            return kind.model_construct()

    def check(self) -> None:
        """Raise ConfigError for all mistakes in the validated tables."""
        if self._complaints:
            raise ConfigError("\n".join(self._complaints))


def _place(prefix: str, table: str, field: str) -> str:
    return f"{prefix}[{table}] {field}" if prefix else f"{ENV_PREFIX}{table}__{field}".upper()


def read_file(path: str | Path) -> Tables:
    """Read a settings file; ConfigError if it is missing or not TOML or has an unknown table."""
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the settings file: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for table, values in tables.items():
        if table not in TABLES and not isinstance(values, dict):
            known = ", ".join(f"[{name}]" for name in TABLES)
            raise ConfigError(f"{path}: {table}: stands below no table; put it into one of {known}")
        if table not in TABLES:
            raise ConfigError(f"{path}: [{table}]: no such table{_near(table, TABLES)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {table}: is a table; write [{table}] and its keys below")
    return tables


def read_environment(env: Mapping[str, str]) -> Tables:
    """Read our variables from an environment; ConfigError for one that is no setting."""
    tables: Tables = {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in _NO_SETTINGS:
            continue
        table, separator, field = variable[len(ENV_PREFIX) :].lower().partition("__")
        if not separator or not field:
            raise ConfigError(
                f"{variable}: not a setting; they are named {ENV_PREFIX}TABLE__FIELD, "
                f"for example {ENV_PREFIX}ROUTER__PORT"
            )
        if table not in TABLES:
            raise ConfigError(f"{variable}: no table [{table}]{_near(table, TABLES)}")
        tables.setdefault(table, {})[field] = value
    return tables


def resolved_model(model: ModelSettings) -> ModelSettings:
    """Find the demo and its drafter where they are installed, and fill in the served name."""
    path = model.path
    if path in (DEMO_MODEL, DEMO_DRAFTER) and not Path(path).is_dir():
        path = os.path.join(PACKAGES, path)
    is_hub_id = "/" in path and may_be_hub_id(path) and not Path(path).is_dir()
    names = model.served_name or (path if is_hub_id else model_name(Path(path)),)
    return model.model_copy(update={"path": path, "served_name": names})


def may_be_hub_id(path: str) -> bool:
    """Whether this could be the id of a model on the Hugging Face hub."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path) is not None


def complaint_about(problem: ErrorDetails) -> str:
    """Word one of pydantic's errors."""
    value = repr(problem["input"])
    if len(value) > 60:
        value = value[:57] + "..."
    message = problem["msg"].removeprefix("Value error, ")
    message = " ".join(message.replace("Input should be", "should be").split())
    return f"{message} (it is {value})"


def _near(name: str, known: Iterable[str]) -> str:
    return near(name, known) or f"; there are {', '.join(known)}"


def child_environment(env: Mapping[str, str], root: str = PACKAGES) -> dict[str, str]:
    """Return an environment in which a child process imports the packages in `root`."""
    # Keeps the working folder out of Python's path: it may hold another `common`.
    environment = {**env, "PYTHONSAFEPATH": "1"}
    if os.path.basename(root) not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return environment


def inherited_fd(env: Mapping[str, str], variable: str) -> int | None:
    """Return a descriptor that the process which started this one has passed on."""
    text = env.get(variable, "")
    if text and not text.isdigit():
        raise ConfigError(f"{variable}: should be a file descriptor (it is {text!r})")
    return int(text) if text else None
