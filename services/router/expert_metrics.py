"""What `/metrics` says of experts: a sample for each expert of each layer of each compute.

A large model has 6,000 to 23,000 of them. prometheus_client would stop the router's loop for 50 ms
to write 6,000; written here they take 1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from common.messages.experts import TOKENS_METRIC, ExpertLoad
from services.router.groups import RegisteredWorker


class ExpertMetric(NamedTuple):
    name: str
    kind: str
    about: str
    samples: Callable[[str, str, ExpertLoad], Iterator[str]]  # of a name and a replica


def expert_lines(workers: Sequence[RegisteredWorker]) -> Iterator[str]:
    """Yield lines in Prometheus' text format, at most those of one compute at a time; none where
    no model has experts."""
    loads = [(_quoted(worker.name), worker.experts) for worker in workers if worker.experts]
    for name, kind, about, samples in METRICS if loads else ():
        yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
        for replica, load in loads:
            yield "".join(samples(name, replica, load))


def _tokens(name: str, replica: str, load: ExpertLoad) -> Iterator[str]:
    for layer, tokens in load.by_layer():
        labels = f'{{replica="{replica}",layer="{layer}",expert="'
        for expert, count in enumerate(tokens):
            yield f'{name}{labels}{expert}"}} {count}\n'


def _imbalances(name: str, replica: str, load: ExpertLoad) -> Iterator[str]:
    for one in load.by_layer():
        yield f'{name}{{replica="{replica}",layer="{one.layer}"}} {one.imbalance:.4g}\n'


def _quoted(value: str) -> str:
    """What stands between a label's quotation marks."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


METRICS = (
    ExpertMetric(
        TOKENS_METRIC,
        "counter",
        "Tokens that this expert was given since the start.",
        _tokens,
    ),
    ExpertMetric(
        "slipstream_compute_expert_imbalance_ratio",
        "gauge",
        "Tokens of the layer's busiest expert over the mean of all, since the start.",
        _imbalances,
    ),
)
