"""Settings: one TOML file and the environment, read once into frozen structures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen group of settings that belongs to one owner; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(Settings):
    """The `[model]` table: which model all services serve."""

    path: str = "models/demo"  # a Hugging Face folder or a hub id
    served_name: str = ""  # default: the folder's name or the hub id
    revision: str = ""


class LinkSettings(Settings):
    """The `[links]` table: where inboxes are and how they are protected."""

    bind: str = "ipc://{run_dir}/{name}.sock"  # or tcp://ADDRESS:PORT, port 0 picks a free one
    advertise: str = ""  # default: the bound endpoint, or this host's address towards a router
    routers: tuple[str, ...] = ()  # inboxes of the routers; names are resolved every second
    run_dir: str = ""  # default: a private folder made for this run
    max_message_bytes: int = 64 << 20
    curve_dir: str = ""  # keys for links that leave the host


class TelemetrySettings(Settings):
    """The `[telemetry]` table."""

    log_level: str = "info"
    log_format: str = "auto"  # auto: console on a terminal, JSON in a pipe
    traces: str = "none"  # none, console, or the URL of an OTLP/HTTP collector
