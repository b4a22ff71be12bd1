"""What each replica asks of a Ray cluster, which of them belong on one node, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.config import SERVICE_TABLES, ModelSettings, Tables
from common.errors import ConfigError
from common.link.resolve import TcpPlace
from services.launcher.plan import ROUTERS_FILE, Counts, Plan, tables_of_run
from services.launcher.preflight import check_ranks, split_option

STAGES = ("compute", "tokenizer", "detokenizer")  # what is kept together: compute is the largest
CPUS_OF_COMPUTE = {"cuda": 1.0, "sim": 1.0, "cpu": 2.0}  # one thread drives a GPU

Resources = dict[str, float]
"""Amounts as Ray names them: CPU, GPU."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What one replica of each service asks of its node."""

    by_service: Mapping[str, Resources]

    def ring(self, counts: Counts, index: int) -> dict[str, Resources]:
        """Return the bundles of the placement group that keeps the stages of ring `index` together.

        Replica k of each stage belongs to ring k, as far as there are so many of it.
        """
        return {stage: self.by_service[stage] for stage in STAGES if getattr(counts, stage) > index}


def needs_of(plan: Plan, has_gpus: bool) -> Needs:
    """Work out what replicas ask for; ConfigError for what cannot be had on a Ray cluster."""
    if plan.value("compute", "pin") == "on":
        raise ConfigError(
            "--pin on: Ray chooses the cores of its nodes; leave it out with --on ray"
        )
    device: str = plan.compute.device
    if device == "auto":
        device = "cuda" if has_gpus else "cpu"
    check_ranks(plan, device, num_gpus=0)
    gpus, count = plan.ray.compute_gpus, plan.num_processes
    if gpus > 0 and count > 1:
        raise ConfigError(
            f"[ray] compute_gpus is {gpus:g}, and {split_option(plan)} takes {count} whole GPUs "
            "for each compute; leave it out"
        )
    if gpus < 0:
        gpus = float(count) if device == "cuda" else 0.0
    if device == "cuda" and not gpus:
        raise ConfigError("[ray] compute_gpus is 0, but the device cuda needs some of a GPU")
    needs = {
        service: {"CPU": float(getattr(plan.ray, f"{service}_cpus"))} for service in SERVICE_TABLES
    }
    needs["compute"]["CPU"] = plan.ray.compute_cpus or plan.num_processes * CPUS_OF_COMPUTE[device]
    if gpus:
        needs["compute"]["GPU"] = gpus
    return Needs(needs)


def text_of(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a replica's process runs: its node's address, and its folders there.

    `inbox_port` is 0 where nobody has to know it before the process runs. `local_dir` is shared by
    the replicas of this launch on this node.
    """

    host: str
    run_dir: str
    local_dir: str
    inbox_port: int = 0

    @property
    def inbox(self) -> str:
        return str(TcpPlace(self.host, str(self.inbox_port)))

    @property
    def keys(self) -> str:
        return f"{self.run_dir}/keys"

    @property
    def routers(self) -> str:
        """The file that lists the routers' inboxes, which move when a node dies."""
        return f"{self.run_dir}/{ROUTERS_FILE}"


def tables_of_replica(plan: Plan, model: ModelSettings, spot: Spot, needs: Needs) -> Tables:
    """Return the settings of one process: tcp with keys between nodes, a shortcut on its own."""
    tables = tables_of_run(plan, model, spot.run_dir, plan.telemetry.log_format)
    tables.pop("ray", None)
    tables["links"].update(
        bind=spot.inbox,
        local_dir=spot.local_dir,
        curve_dir=spot.keys,
        insecure=False,
    )
    compute = tables.setdefault("compute", {})
    if "max_threads" not in plan.tables.get("compute", {}):
        cpus = int(needs.by_service["compute"]["CPU"])
        compute["max_threads"] = max(1, cpus // plan.num_processes)
    return tables
