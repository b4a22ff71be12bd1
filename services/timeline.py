"""The times that `slipstream timeline` draws: fetched from a router, as a trace for Perfetto."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from common.errors import MalformedMessage
from common.link.codec import unpack
from common.messages.queries import StagePart, Timeline, Track

TIMEOUT_S = 30.0
SAME_HOST_S = 0.05  # clocks nearer than this are one clock, read a little apart
STAGES = ("tokenizer", "compute", "detokenizer", "router")  # in the order of the ring


class TimelineError(Exception):
    """There is no timeline; the text says why and what to do."""


class Span(NamedTuple):
    """One span, in seconds on the clock of the whole timeline."""

    name: str
    began_s: float
    ended_s: float
    args: dict[str, float]


def fetch(url: str, seconds: float, api_key: str = "") -> Timeline:
    """Fetch the last seconds of a router and its workers; TimelineError if that fails."""
    address = f"{url.rstrip('/')}/timeline?{urllib.parse.urlencode({'seconds': seconds})}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return unpack(Timeline, answer.read())
    except urllib.error.HTTPError as error:
        body = error.read(500).decode(errors="replace")
        raise TimelineError(f"{address}: status {error.code}: {body}") from error
    except MalformedMessage as error:
        raise TimelineError(f"{address}: is it a server of this version? {error}") from error
    except (OSError, ValueError) as error:
        raise TimelineError(f"{address}: {error}; is the server there? --url says where") from error


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Make the trace: a process for each part, a thread for each lane of it."""
    offsets_s = _offsets_s(timeline)
    lanes = [
        (part, lane, list(_spans(tracks, offset_s)))
        for part, offset_s in sorted(
            zip(timeline.parts, offsets_s, strict=True),
            key=lambda pair: (STAGES.index(pair[0].service), pair[0].name),
        )
        for lane, tracks in _lanes(part)
    ]
    start_s = min((span.began_s for _, _, spans in lanes for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    pids: dict[tuple[str, str], int] = {}
    tid = 0
    for part, lane, spans in lanes:
        key = (part.service, part.name)
        if key not in pids:
            pids[key] = len(pids) + 1
            events.append(_meta("process_name", pids[key], 0, name=part.name))
            events.append(_meta("process_sort_index", pids[key], 0, sort_index=pids[key]))
        for number, row in enumerate(_rows(spans)):
            tid += 1
            name = lane if number == 0 else f"{lane} {number + 1}"
            events.append(_meta("thread_name", pids[key], tid, name=name))
            events.append(_meta("thread_sort_index", pids[key], tid, sort_index=tid))
            events += [_event(span, start_s, pids[key], tid) for span in row]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def summary(timeline: Timeline) -> list[str]:
    """Return lines on how busy the device was and how much text was made meanwhile."""
    offsets_s = _offsets_s(timeline)
    parts = list(zip(timeline.parts, offsets_s, strict=True))
    steps: list[Span] = []
    lines = []
    for part, offset_s in parts:
        device = [track for track in part.tracks if track.lane == "device"]
        spans = sorted(_spans(device, offset_s), key=lambda span: span.began_s)
        if spans:
            steps += spans
            wall_s = spans[-1].ended_s - spans[0].began_s
            busy = sum(span.ended_s - span.began_s for span in spans) / wall_s if wall_s else 1.0
            lines.append(
                f"{part.name}: {len(spans)} steps in {wall_s:.2f} s, device busy {busy:.1%}"
            )
    for part, offset_s in parts:
        texts = list(_spans((track for track in part.tracks if track.lane == "text"), offset_s))
        if texts and steps:
            share = share_during(texts, steps)
            lines.append(f"{part.name}: {share:.1%} of its work was done while a step ran")
    return lines


def share_during(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """Return the share of the spans' time that lies within the time of any of the others."""
    edges = [(other.began_s, other.ended_s) for other in others]
    covered: list[list[float]] = []
    for began_s, ended_s in sorted(edges):
        if covered and began_s <= covered[-1][1]:
            covered[-1][1] = max(covered[-1][1], ended_s)
        else:
            covered.append([began_s, ended_s])
    total_s = within_s = 0.0
    place = 0
    for span in sorted(spans, key=lambda span: span.began_s):
        total_s += span.ended_s - span.began_s
        while place < len(covered) and covered[place][1] <= span.began_s:
            place += 1
        for began_s, ended_s in covered[place:]:
            if began_s >= span.ended_s:
                break
            within_s += min(ended_s, span.ended_s) - max(began_s, span.began_s)
    return within_s / total_s if total_s else 0.0


def _offsets_s(timeline: Timeline) -> list[float]:
    """Return what to add to each part's times, so that all are on the first part's clock."""
    differences = [part.unix_s - timeline.parts[0].unix_s for part in timeline.parts]
    return [0.0 if abs(gap_s) < SAME_HOST_S else gap_s for gap_s in differences]


def _lanes(part: StagePart) -> Iterator[tuple[str, list[Track]]]:
    for lane in dict.fromkeys(track.lane for track in part.tracks):
        yield lane, [track for track in part.tracks if track.lane == lane]


def _spans(tracks: Iterable[Track], offset_s: float) -> Iterator[Span]:
    """Yield the spans of tracks, without rows that were never written."""
    for track in tracks:
        columns = zip(
            track.began_s, track.ended_s, *(arg.values for arg in track.args), strict=True
        )
        names = [arg.name for arg in track.args]
        for began_s, ended_s, *values in columns:
            if began_s <= ended_s:  # false for NaN
                args = dict(zip(names, values, strict=True))
                yield Span(track.name, began_s + offset_s, ended_s + offset_s, args)


def _rows(spans: list[Span]) -> list[list[Span]]:
    """Lay spans out in as few rows as possible without overlaps."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.began_s):
        row = next((row for row in rows if row[-1].ended_s <= span.began_s), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _event(span: Span, start_s: float, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "ph": "X",
        "ts": round((span.began_s - start_s) * 1e6, 3),
        "dur": round((span.ended_s - span.began_s) * 1e6, 3),
        "pid": pid,
        "tid": tid,
        "args": {name: int(value) for name, value in span.args.items() if value == value},
    }


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
