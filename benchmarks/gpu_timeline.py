"""What the engine and its device did during a run, read out of the server's own timeline."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.messages.queries import StagePart, Timeline, Track, TrackArg

HOST_PHASES = ("plan", "launch", "commit", "send")  # what is left out is `wait`

Column = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Steps of a run; None where the server cannot tell. Host times leave the waiting out."""

    steps: int
    idle_share: float | None  # of the device's time, between steps while there was work
    host_ms: float | None  # of a step, the median
    host_p99_ms: float | None
    device_ms: float | None  # of a step, the median
    host_parts_ms: dict[str, float] = field(default_factory=dict)  # the median of each phase


def open_times(requests: Sequence[Interval]) -> list[Interval]:
    """Merge the times from a request to its end into those in which any was open."""
    merged: list[Interval] = []
    for begin_s, end_s in sorted(requests):
        if merged and begin_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((begin_s, end_s))
    return merged


def device_times(timeline: Timeline, requests: Sequence[Interval]) -> DeviceTimes | None:
    """Sum up the steps of the first compute during these requests; None if there were none.

    The clock is the host's monotonic one, for the clients and the server alike. A gap between two
    steps counts as idle unless there was a time in it without any request.
    """
    tracks = _tracks(timeline)
    busy = open_times(requests)
    if not busy or "plan" not in tracks:
        return None
    plan = tracks["plan"]
    within = (plan[0] >= busy[0][0]) & (plan[0] <= busy[-1][1])
    if not within.any():
        return None
    parts = {
        name: np.nan_to_num((tracks[name][1] - tracks[name][0])[within])
        for name in HOST_PHASES
        if name in tracks
    }
    host = sum(parts.values())
    start_s, end_s = (times[within] for times in tracks.get("step", (plan[0] * np.nan,) * 2))
    known = ~np.isnan(start_s) & ~np.isnan(end_s)
    start_s, end_s = start_s[known], end_s[known]
    idle_s = _idle_s(start_s, end_s, busy)
    busy_s = float((end_s - start_s).sum())
    return DeviceTimes(
        steps=int(within.sum()),
        idle_share=idle_s / (idle_s + busy_s) if busy_s else None,
        host_ms=1e3 * float(np.median(host)),
        host_p99_ms=1e3 * float(np.quantile(host, 0.99)),
        host_parts_ms={name: 1e3 * float(np.median(part)) for name, part in parts.items()},
        device_ms=1e3 * float(np.median(end_s - start_s)) if len(end_s) else None,
    )


def _idle_s(start_s: Column, end_s: Column, busy: list[Interval]) -> float:
    idle_s = 0.0
    rests = [(before[1], after[0]) for before, after in zip(busy, busy[1:], strict=False)]
    for begin, end in zip(end_s[:-1], start_s[1:], strict=True):
        if end > begin and not any(rest[0] < end and rest[1] > begin for rest in rests):
            idle_s += float(end - begin)
    return idle_s


def _tracks(timeline: Timeline) -> dict[str, tuple[Column, Column]]:
    """Return (began, ended) of the first compute's tracks, by name."""
    for part in timeline.parts:
        if part.service == "compute":
            return {track.name: (_column(track.began_s), _column(track.ended_s))
                    for track in part.tracks}  # fmt: skip
    return {}


def _column(values: array[float]) -> Column:
    return np.frombuffer(values, dtype=np.float64)


def cut(timeline: Timeline, begin_s: float, end_s: float) -> Timeline:
    """Return the spans that begin within a time, of all processes of this host."""
    return Timeline(
        tuple(
            StagePart(
                part.service,
                part.name,
                part.unix_s,
                tuple(_cut(track, begin_s, end_s) for track in part.tracks),
            )
            for part in timeline.parts
        )
    )


def _cut(track: Track, begin_s: float, end_s: float) -> Track:
    began_s = _column(track.began_s)
    within = (began_s >= begin_s) & (began_s <= end_s)

    def taken(values: array[float]) -> array[float]:
        return array("d", _column(values)[within].tobytes())

    args = tuple(TrackArg(arg.name, taken(arg.values)) for arg in track.args)
    return Track(track.lane, track.name, taken(track.began_s), taken(track.ended_s), args)
