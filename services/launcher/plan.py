"""What is to be launched: the settings of all services, merged, and how many of each."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from common.config import (
    ENV_PREFIX,
    SERVICE_TABLES,
    LinkSettings,
    ModelSettings,
    Settings,
    Tables,
    TelemetrySettings,
    layers_of,
    validated,
)
from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.detokenizer.config import DetokenizerSettings
from services.launcher.machine import Cores, available_cores, place
from services.router.config import RouterSettings
from services.tokenizer.config import TokenizerSettings

# The types alone: what is wrong in a service's own table, the service finds and says.
SETTINGS: Mapping[str, type[Settings]] = {
    "model": ModelSettings,
    "links": LinkSettings,
    "telemetry": TelemetrySettings,
    "router": RouterSettings,
    "tokenizer": TokenizerSettings,
    "compute": ComputeSettings,
    "detokenizer": DetokenizerSettings,
}
DEFAULT_GRACE_S = 30.0
MAX_PROCESSES = 256  # of one service on one host


def _count(about: str) -> Any:
    return Field(1, ge=1, le=MAX_PROCESSES, description=f"processes that {about}")


class Counts(Settings):
    """How many processes of each service run."""

    tokenizer: int = _count("turn prompts into tokens")
    compute: int = _count("run the model; on a machine with several GPUs each takes one, in turn")
    detokenizer: int = _count("turn tokens into text")
    router: int = _count("speak HTTP; all share one port")

    def names(self, service: str) -> tuple[str, ...]:
        """Return the names of one service's instances."""
        return tuple(f"{service}-{index}" for index in range(getattr(self, service)))


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings as the user gave them, and how many processes are to run."""

    tables: Tables
    counts: Counts
    model: ModelSettings
    telemetry: TelemetrySettings

    def value(self, table: str, field: str) -> str:
        """Return a setting as text."""
        default = SETTINGS[table].model_fields[field].default
        return str(self.tables.get(table, {}).get(field, default))

    @property
    def grace_s(self) -> float:
        """The longest grace time of any service."""
        try:
            return max(float(self.value(service, "grace_s")) for service in SERVICE_TABLES)
        except ValueError:
            return DEFAULT_GRACE_S  # the service itself says what is wrong with it

    @property
    def needs_weights(self) -> bool:
        dummy = self.value("compute", "load_format") == "dummy"
        return not dummy and self.value("compute", "device") != "sim"


def make_plan(config: str | None, env: Mapping[str, str], options: Tables, counts: Counts) -> Plan:
    """Merge the settings file, the environment and the command line, later over earlier.

    Raises ConfigError for a file that cannot be read and for mistakes in the shared tables; a
    service finds those in its own table.
    """
    layers = layers_of(config, env, options)
    tables: Tables = {}
    for layer in layers:
        for table, values in layer.tables.items():
            tables.setdefault(table, {}).update(values)
    return Plan(
        tables,
        counts,
        validated(ModelSettings, "model", layers),
        validated(TelemetrySettings, "telemetry", layers),
    )


def tables_of_run(plan: Plan, model: ModelSettings, run_dir: str, log_format: str) -> Tables:
    """Add to the user's settings what only the launcher knows."""
    tables = {table: dict(values) for table, values in plan.tables.items()}
    tables["model"] = model.model_dump()
    tables.setdefault("telemetry", {})["log_format"] = log_format
    tables.setdefault("links", {}).update(
        bind="ipc://{run_dir}/{name}.sock",
        advertise="",
        run_dir=run_dir,
        routers=[f"ipc://{run_dir}/{name}.sock" for name in plan.counts.names("router")],
        curve_dir="",  # no other user can enter the folder
    )
    if plan.counts.compute > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        threads = max(1, (cores - 1) // plan.counts.compute)
        tables.setdefault("compute", {}).setdefault("max_threads", threads)
    return tables


def environment_of(name: str, plan: Plan, env: Mapping[str, str], root: str) -> dict[str, str]:
    """Return the environment of one service, without settings: those are in its file.

    `root` is the folder that holds the packages. The working folder is kept out of Python's path,
    since it may hold another `common`. Several compute processes get a GPU each, in turn.
    """
    kept = {key: value for key, value in env.items() if not key.startswith(ENV_PREFIX)}
    kept["PYTHONSAFEPATH"] = "1"
    if os.path.basename(root) not in ("site-packages", "dist-packages"):
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))
    service, _, index = name.rpartition("-")
    on_gpu = plan.value("compute", "device") in ("auto", "cuda")
    if service == "compute" and plan.counts.compute > 1 and on_gpu:
        gpus = gpus_in(env)
        if gpus:
            kept["CUDA_VISIBLE_DEVICES"] = gpus[int(index) % len(gpus)]
    return kept


def cores_of(plan: Plan, env: Mapping[str, str]) -> Cores | None:
    """Choose a core for each thread that drives a GPU; None if they get none of their own.

    Raises ConfigError if the user insists and there are too few cores.
    """
    pin = plan.value("compute", "pin")
    if pin == "off" or "core" in plan.tables.get("compute", {}):  # the user has chosen
        return None
    device = plan.value("compute", "device")
    on_gpu = device == "cuda" or (device == "auto" and bool(gpus_in(env)))
    if pin != "on" and not on_gpu:
        return None
    cores = available_cores()
    placed = place(cores, plan.counts.compute, forced=pin == "on")
    if placed is None and pin == "on":
        raise ConfigError(
            f"[compute] pin is on: {plan.counts.compute} compute processes and the others need "
            f"more than the {len(cores)} cores that there are"
        )
    return placed


def gpus_in(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return [gpu for gpu in env["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    return [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def toml_text(tables: Tables) -> str:
    """Return the text of a settings file that reads back as these tables."""
    parts = []
    for table, values in tables.items():
        lines = [f"{toml_value(str(key))} = {toml_value(value)}\n" for key, value in values.items()]
        parts.append(f"[{table}]\n" + "".join(lines))
    return "\n".join(parts)


def write_private(path: str, text: str) -> None:
    """Write a file that only this user can read: it may hold API keys."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = ", ".join(
            f"{toml_value(str(key))} = {toml_value(item)}" for key, item in value.items()
        )
        return "{" + items + "}"
    return str(value)  # numbers and dates, as TOML writes them
