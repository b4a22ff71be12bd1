"""Settings of `slipstream serve --on ray`: the cluster, and what replicas ask of it."""

from __future__ import annotations

from pydantic import Field

from common.config import Settings


def _cpus(service: str, default: float, more: str = "") -> float:
    about = f"processors that Ray keeps for one {service}{more}"
    number: float = Field(default, ge=0, description=about)
    return number


class RaySettings(Settings):
    """The `[ray]` table, for `slipstream serve --on ray`."""

    address: str = Field(
        "",
        description="the head of the Ray cluster, HOST:PORT or ray://HOST:PORT (default: "
        "RAY_ADDRESS, or the one that runs here, or a new one)",
    )
    router_cpus: float = _cpus("router", 0.5)
    tokenizer_cpus: float = _cpus("tokenizer", 0.5)
    compute_cpus: float = _cpus("compute", 0.0, " (default: 1, or 2 where it has no GPU)")
    detokenizer_cpus: float = _cpus("detokenizer", 0.5)
    compute_gpus: float = Field(
        -1.0,
        ge=-1,
        le=1,
        description="GPUs that Ray keeps for one compute, such as 0.5 where two share one "
        "(default: one for each of its processes on the device cuda, and on auto if the "
        "cluster has any)",
    )
    metrics_targets: str = Field(
        "",
        description="a file for Prometheus's file_sd in which the routers' addresses are kept "
        "(default: none)",
    )
