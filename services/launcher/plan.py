"""What is launched: the merged settings, and how many processes of a service on which cores."""

from __future__ import annotations

import glob
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from common.config import (
    ENV_PREFIX,
    PACKAGES,
    SERVICE_TABLES,
    SHARED_SETTINGS,
    ModelSettings,
    RenamedSetting,
    Settings,
    Tables,
    TelemetrySettings,
    WrittenSettings,
    child_environment,
)
from common.errors import ConfigError
from common.link.resolve import LIST_SCHEME
from services.compute.config import ComputeSettings
from services.detokenizer.config import DetokenizerSettings
from services.launcher.autoscale import CountRange
from services.launcher.ray_config import RaySettings
from services.launcher.replicas import MAX_PROCESSES, ScaleError
from services.router.config import RouterSettings
from services.tokenizer.config import TokenizerSettings

# Only the types: what goes with a machine or a model is for the service to say.
SETTINGS: Mapping[str, type[Settings]] = {
    **SHARED_SETTINGS,
    "router": RouterSettings,
    "tokenizer": TokenizerSettings,
    "compute": ComputeSettings,
    "detokenizer": DetokenizerSettings,
    "ray": RaySettings,
}
INBOX = "ipc://{run_dir}/{name}.sock"
ROUTERS_FILE = "routers"  # in the run directory: the inboxes of all routers, now and later
IDLE_S = 600.0  # until a compute ends of which none need run
MIN_CPUS = 8  # with fewer, a core is worth more to the other services
MIN_COMMON_CPUS = 4  # router, tokenizer, detokenizer, and what else runs on the machine
COMMON_CPUS_PER_COMPUTE = 2


def _count(about: str) -> Any:
    return Field(1, ge=1, le=MAX_PROCESSES, description=f"processes that {about}")


class Counts(Settings):
    tokenizer: int = _count("turn prompts into tokens")
    compute: int = _count("run the model; each takes the next GPU, or as many as it is split over")
    detokenizer: int = _count("turn tokens into text")
    router: int = _count("speak HTTP; all share one port")

    def names(self, service: str) -> tuple[str, ...]:
        return tuple(f"{service}-{index}" for index in range(getattr(self, service)))


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings as the user gave them, and how many processes are to run."""

    tables: Tables
    counts: Counts
    model: ModelSettings
    telemetry: TelemetrySettings
    autoscale: Mapping[str, CountRange] = field(default_factory=dict)
    renamed: Sequence[RenamedSetting] = ()
    ray: RaySettings = RaySettings.model_validate({})

    @property
    def compute(self) -> ComputeSettings:
        return ComputeSettings.model_validate(self.tables.get("compute", {}))

    @property
    def port(self) -> int:
        return RouterSettings.model_validate(self.tables.get("router", {})).port

    def value(self, table: str, field: str) -> str:
        default = SETTINGS[table].model_fields[field].default
        return str(self.tables.get(table, {}).get(field, default))

    @property
    def most_computes(self) -> int:
        """How many there may come to be by themselves."""
        scaled = self.autoscale.get("compute")
        return max(self.counts.compute, scaled.most if scaled else 0)

    @property
    def num_ranks(self) -> int:
        """Processes that each layer of a compute is split over."""
        return self.compute.tensor_parallel_size

    @property
    def num_stages(self) -> int:
        """Processes that a compute's layers are split over."""
        return self.compute.pipeline_parallel_size

    @property
    def num_copies(self) -> int:
        """Processes of a compute that have the whole model each, and share prompts."""
        return self.compute.prefill_context_parallel_size

    @property
    def num_processes(self) -> int:
        """Of each compute; on GPUs each has one."""
        return self.num_ranks * self.num_stages * self.num_copies

    @property
    def grace_s(self) -> float:
        """The longest grace time of any service."""
        return max(float(self.value(service, "grace_s")) for service in SERVICE_TABLES)

    @property
    def needs_weights(self) -> bool:
        return self.compute.load_format != "dummy" and self.compute.device != "sim"


def make_plan(
    config: str | None,
    env: Mapping[str, str],
    options: Tables,
    counts: Counts,
    autoscale: Mapping[str, CountRange] | None = None,
) -> Plan:
    """Merge the settings of file, environment and options; ConfigError for what is wrong in them,
    which is not to be found when a model has been downloaded."""
    autoscale = autoscale or {}
    for service, scaled in autoscale.items():
        if getattr(counts, service) > scaled.most:
            count = getattr(counts, service)
            raise ConfigError(f"--{service}s {count} is above --autoscale {service}s={scaled}")
    least = {name: max(getattr(counts, name), scaled.least) for name, scaled in autoscale.items()}
    written = WrittenSettings(SETTINGS, config, env, options)
    plan = Plan(
        written.tables,
        counts.model_copy(update=least),
        written.validated(ModelSettings, "model"),
        written.validated(TelemetrySettings, "telemetry"),
        autoscale,
        written.renamed,
        written.validated(RaySettings, "ray"),
    )
    for table in ("links", *SERVICE_TABLES):
        written.validated(SETTINGS[table], table)
    written.check()
    return plan


def tables_of_run(plan: Plan, model: ModelSettings, run_dir: str, log_format: str) -> Tables:
    """Add to the user's settings what only the launcher knows."""
    tables = {table: dict(values) for table, values in plan.tables.items()}
    tables["model"] = model.model_dump()
    tables.setdefault("telemetry", {})["log_format"] = log_format
    tables.setdefault("links", {}).update(
        bind=INBOX,
        advertise="",
        run_dir=run_dir,
        routers=[f"{LIST_SCHEME}{run_dir}/{ROUTERS_FILE}"],
        curve_dir="",  # no other user can enter the folder
    )
    if (num_processes := plan.most_computes * plan.num_processes) > 1:
        threads = max(1, (len(available_cpus()) - 1) // num_processes)
        tables.setdefault("compute", {}).setdefault("max_threads", threads)
    if plan.autoscale:
        tables["router"] = scaled_router(plan)
    return tables


def scaled_router(plan: Plan) -> dict[str, Any]:
    """Add what the launcher needs to ask the routers, and what compute needs to end at all."""
    router = dict(plan.tables.get("router", {}))
    has_keys = router.get("api_keys_file") or plan.value("router", "api_keys").strip("[]()")
    if has_keys and not router.get("metrics_token"):
        router["metrics_token"] = secrets.token_urlsafe()
    computes = plan.autoscale.get("compute")
    if computes is not None and computes.least == 0:
        router.setdefault("scaling_idle_s", IDLE_S)
    return router


def environment_of(
    name: str, plan: Plan, env: Mapping[str, str], root: str = PACKAGES
) -> dict[str, str]:
    """Return one service's environment without settings: those are in its file."""
    others = {key: value for key, value in env.items() if not key.startswith(ENV_PREFIX)}
    environment = child_environment(others, root)
    service, _, index = name.rpartition("-")
    on_gpu = plan.value("compute", "device") in ("auto", "cuda")
    # Computes get a GPU each, or neighbours, in turn; those that are added later as well.
    if service == "compute" and on_gpu and (gpus := gpus_in(env)):
        count = plan.num_processes
        first = int(index) % max(1, len(gpus) // count) * count
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + count])
    return environment


def check_gpus_for(number: int, plan: Plan, env: Mapping[str, str]) -> None:
    """Raise ScaleError where the GPUs of this host do not suffice for this compute of a model that
    is split; of others several may share one."""
    count, num_gpus = plan.num_processes, len(gpus_in(env))
    on_gpu = num_gpus > 0 and plan.value("compute", "device") in ("auto", "cuda")
    if on_gpu and count > 1 and (number + 1) * count > num_gpus:
        raise ScaleError(
            f"compute: each takes {count} GPUs, and {num_gpus} can be used here; ask for fewer"
        )


def cores_of(plan: Plan, env: Mapping[str, str]) -> Cores | None:
    """Choose a core for each thread that drives a GPU; ConfigError if `pin` asks for too many."""
    pin = plan.value("compute", "pin")
    if pin == "off" or "core" in plan.tables.get("compute", {}):  # the user has chosen
        return None
    device = plan.value("compute", "device")
    on_gpu = device == "cuda" or (device == "auto" and bool(gpus_in(env)))
    if pin != "on" and not on_gpu:
        return None
    cores = cores_among(available_cpus())
    num_processes = plan.most_computes * plan.num_processes
    placed = place(cores, num_processes, forced=pin == "on")
    if placed is None and pin == "on":
        raise ConfigError(
            f"[compute] pin is on: {num_processes} compute processes and the others need more "
            f"than the {len(cores)} cores that there are"
        )
    return placed


@dataclass(frozen=True, slots=True)
class Cores:
    """A CPU for each process of each compute, in order, and the CPUs for everything else."""

    own: tuple[int, ...]
    common: frozenset[int]

    def environment_of(self, compute: int, num_processes: int) -> dict[str, str]:
        """The settings of a compute's own cores; none for one that was added later."""
        own = list(map(str, self.own[compute * num_processes :][:num_processes]))
        cores = {"CORE": own[0]} if own else {}
        if own[1:]:
            cores["FOLLOWER_CORES"] = ",".join(own[1:])
        return {f"{ENV_PREFIX}COMPUTE__{name}": value for name, value in cores.items()}


def place(cores: Sequence[Sequence[int]], num_computes: int, forced: bool = False) -> Cores | None:
    """Give each compute replica a whole core; None if that would leave too few for the rest.

    `cores` are the CPUs that may be used, core by core. Replicas get the last ones, since
    interrupts tend to go to the first, and only the first CPU of each: its sibling has the same
    execution units. With `forced`, one core is enough for the rest.
    """
    kept = len(cores) - num_computes
    if kept < 1:
        return None
    common = frozenset(cpu for core in cores[:kept] for cpu in core)
    enough = max(MIN_COMMON_CPUS, COMMON_CPUS_PER_COMPUTE * num_computes)
    too_few = sum(map(len, cores)) < MIN_CPUS or len(common) < enough
    if too_few and not forced:
        return None
    return Cores(tuple(core[0] for core in cores[kept:]), common)


def available_cpus() -> set[int]:
    """Return the CPUs that this process may use; none if the system cannot tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def cores_among(
    cpus: Iterable[int], siblings_of: Callable[[int], str] | None = None
) -> list[tuple[int, ...]]:
    """Group CPUs by the core that they belong to."""
    allowed = set(cpus)
    siblings_of = siblings_of or _siblings_of
    cores = {tuple(sorted({cpu, *cpus_in(siblings_of(cpu))} & allowed)) for cpu in allowed}
    return sorted(cores)


def cpus_in(text: str) -> set[int]:
    """Parse a list of CPUs as Linux writes it, such as `0-3,8`."""
    cpus: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _siblings_of(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text()
    except OSError:
        return ""


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
