"""The page of the GPU's figures: one table with what was recorded of vLLM and what is the goal."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_figures import (
    RECORDED,
    RECORDED_BY,
    RECORDED_HOW,
    TTFT_FIRST_AND_GOAL_MS,
    GpuFigures,
)
from benchmarks.gpu_timeline import DeviceTimes
from benchmarks.report import Report

COLUMNS = [
    "model, workload",
    "tokens/s",
    "vLLM",
    "times vLLM",
    "first",
    "goal",
    "roof",
    "% of roof",
    "TTFT p50 ms (vLLM)",
    "TTFT p99 ms",
    "ITL p50 ms",
    "TPOT mean ms",
    "engine CPU s/s",
    "GPU idle %",
    "host ms/step",
    "GPU ms/step",
]
PROCESS_COLUMNS = [
    "model, workload",
    "requests",
    "prompt tokens",
    "output tokens",
    "wall s",
    "steps",
    "host p99 ms",
    "tokens/event",
    "ITL p99 ms",
    "compute",
    "detokenizer",
    "router",
    "tokenizer",
    "client",
    "client µs/token",
]
ENGINE_COLUMNS = [
    "server",
    "start s",
    "steps",
    "plan ms",
    "launch ms",
    "wait ms",
    "commit ms",
    "GPU idle %",
]
UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one workload on one model."""

    model: str
    workload: str
    figures: GpuFigures


@dataclass(slots=True)
class Findings:
    """Everything that a session found out, in order."""

    rows: list[Row] = field(default_factory=list)
    engines: list[tuple[str, str, float, dict[str, Any]]] = field(default_factory=list)
    checks: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """All that was not as it should be."""
        return [f"{name}: {problem}" for name, problems in self.checks for problem in problems]


def idle_share(stopped: Mapping[str, Any]) -> float | None:
    """Read the device's idle share out of the engine's last log line, if it is in there."""
    busy_s, idle_s = stopped.get("device_busy_s", 0.0), stopped.get("device_idle_s", 0.0)
    return float(idle_s / (busy_s + idle_s)) if busy_s else None


def row_cells(row: Row) -> list[object]:
    """Return one line of the table; what vLLM took is in parentheses."""
    figures, recorded = row.figures, RECORDED.get((row.model, row.workload))
    device = figures.device or DeviceTimes(0, None, None, None, None)
    known = [UNKNOWN] * 6
    held = dict.fromkeys(("p50", "p99", "itl", "tpot", "cpu"), "")
    if recorded is not None:
        rate = figures.tokens_per_s
        known = [
            f"{recorded.tokens_per_s:,.0f}",
            f"{rate / recorded.tokens_per_s:.2f}",
            _reached(rate, recorded.first),
            _reached(rate, recorded.goal),
            f"{recorded.roof:,.0f}",
            f"{100 * rate / recorded.roof:.0f}",
        ]
        held = {
            "p50": f" ({recorded.ttft_p50_ms:g})",
            "p99": f" ({recorded.ttft_p99_ms:g})",
            "itl": f" ({recorded.itl_p50_ms:g})",
            "tpot": f" ({recorded.tpot_mean_ms:g})",
            "cpu": f" ({recorded.engine_cpu_share:.2f})",
        }
    return [
        f"{row.model} {row.workload}",
        f"{figures.tokens_per_s:,.0f}",
        *known,
        f"{1e3 * figures.ttft.p50_s:.1f}{held['p50']}",
        f"{1e3 * figures.ttft.p99_s:.1f}{held['p99']}",
        f"{1e3 * figures.itl.p50_s:.2f}{held['itl']}",
        f"{1e3 * figures.tpot.mean_s:.2f}{held['tpot']}",
        f"{figures.cpu_share('compute'):.2f}{held['cpu']}",
        _number(device.idle_share, ".2f", 100),
        _number(device.host_ms, ".3f"),
        _number(device.device_ms, ".3f"),
    ]


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return UNKNOWN if value is None else f"{factor * value:{form}}"


def _reached(rate: float, target: float) -> str:
    return f"{target:,.0f} {'✓' if rate >= target else '✗'}"


def process_cells(row: Row) -> list[object]:
    """Return one line on where processor time went, in seconds per second of each process."""
    figures = row.figures
    per_event = figures.output_tokens / max(figures.num_events, 1)
    return [
        f"{row.model} {row.workload}",
        figures.num_requests,
        figures.prompt_tokens,
        figures.output_tokens,
        f"{figures.wall_s:.2f}",
        figures.device.steps if figures.device else UNKNOWN,
        _number(figures.device and figures.device.host_p99_ms, ".3f"),
        f"{per_event:.2f}",
        f"{1e3 * figures.itl.p99_s:.2f}",
        *(
            f"{figures.cpu_share(service):.2f}"
            for service in ("compute", "detokenizer", "router", "tokenizer")
        ),
        f"{figures.client_share:.2f}",
        f"{1e6 * figures.client_cpu_per_token_s:.1f}",
    ]


def make_page(findings: Findings, device: str, notes: list[str]) -> Report:
    """Put the findings on a page."""
    report = Report(
        "gpu",
        "The workloads on a GPU, against vLLM and the hardware's limit",
        "The whole stack over HTTP; prompts as token ids, streamed, greedy, to the full length.",
    )
    report.text(f"- device: {device}\n" + "\n".join(f"- {note}" for note in notes))
    report.table(COLUMNS, [row_cells(row) for row in findings.rows])
    report.text(
        f"vLLM is {RECORDED_BY} ({RECORDED_HOW}), its figures in parentheses. `first` and `goal` "
        "are tokens/s to reach, with whether they are; the roof is a timeline of the same requests "
        "with nothing but weights, KV and matrix products at the rates measured on an H200. TTFT "
        f"p50 to reach, first and then: {_ttft_targets()}. GPU idle is the device's time between "
        "steps while there was work; host ms/step is what plan, launch, commit and send take "
        "together, GPU ms/step what the device takes, both as medians."
    )
    if findings.engines:
        report.text("Each server's whole life, warm-up and drains included:")
        report.table(
            [
                "server",
                "start s",
                "steps",
                "plan ms",
                "launch ms",
                "wait ms",
                "commit ms",
                "idle %",
            ],
            [_engine_cells(*engine) for engine in findings.engines],
        )
    report.text("Processor seconds per second, of the busiest process of each kind:")
    report.table(PROCESS_COLUMNS, [process_cells(row) for row in findings.rows])
    report.text("\n".join(_check_lines(findings)))
    report.text("\n".join(f"- served by: `{command}`" for command in findings.commands))
    return report


def _ttft_targets() -> str:
    return "; ".join(
        f"{model} {workload} {first:g} and {goal:g} ms"
        for (model, workload), (first, goal) in TTFT_FIRST_AND_GOAL_MS.items()
    )


def _engine_cells(name: str, how: str, start_s: float, stopped: Mapping[str, Any]) -> list[object]:
    steps = max(int(stopped.get("steps", 0)), 1)
    return [
        f"{name}, {how}",
        round(start_s, 1),
        int(stopped.get("steps", 0)),
        *(
            f"{1e3 * stopped.get(part, 0.0) / steps:.3f}"
            for part in ("plan_s", "launch_s", "wait_s", "commit_s")
        ),
        _number(idle_share(stopped), ".2f", 100),
    ]


def _check_lines(findings: Findings) -> list[str]:
    return [
        f"- {name}: {'; '.join(problems) if problems else 'as it should be'}"
        for name, problems in findings.checks
    ]


def name_of_device(device: str) -> str:
    """Return what the figures were taken on."""
    if device != "cuda" or not (tool := shutil.which("nvidia-smi")):
        return device
    asked = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return said.strip().replace("\n", "; ") or device
