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
NUM_BUSIEST = 4  # experts of a layer that the table names
TABLE_HEAD = "layer         tokens max/mean  busiest experts, with their shares"
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
    lanes = sorted(_lanes(timeline), key=lambda lane: (STAGES.index(lane[0].service), lane[0].name))
    start_s = min((spans[0].began_s for _, _, spans in lanes if spans), default=0.0)
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
    trace: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": events}
    loads = [(part.name, part.experts) for part in timeline.parts if part.experts is not None]
    if loads:
        by_layer = {
            name: {str(layer): tokens.tolist() for layer, tokens in load.by_layer()}
            for name, load in loads
        }
        trace["otherData"] = {"expert_tokens": by_layer}
    return trace


def summary(timeline: Timeline) -> list[str]:
    """Return lines on how busy the device was and how much text was made meanwhile."""
    lanes = [(part, lane, spans) for part, lane, spans in _lanes(timeline) if spans]
    lines = []
    for part, lane, spans in lanes:
        if lane == "device":
            wall_s = spans[-1].ended_s - spans[0].began_s
            busy = sum(span.ended_s - span.began_s for span in spans) / wall_s if wall_s else 1.0
            line = f"{part.name}: {len(spans)} steps in {wall_s:.2f} s, device busy {busy:.1%}"
            lines.append(line + _drafts(spans))
    steps = [span for _, lane, spans in lanes if lane == "device" for span in spans]
    for part, lane, spans in lanes:
        if lane == "text" and steps:
            share = share_during(spans, steps)
            lines.append(f"{part.name}: {share:.1%} of its work was done while a step ran")
    return lines


def _drafts(steps: list[Span]) -> str:
    """Say what became of the drafts of steps, if they had any."""
    drafted, wasted = (
        int(sum(step.args.get(name, 0.0) for step in steps if step.args.get(name, 0.0) > 0.0))
        for name in ("drafted", "wasted")
    )
    if not drafted:
        return ""
    return f", {drafted} tokens drafted, of which {drafted - wasted} accepted and {wasted} wasted"


def expert_table(timeline: Timeline) -> list[str]:
    """Return lines on how evenly experts were used since the start: the busiest of each layer."""
    lines = []
    for part in timeline.parts:
        for place, one in enumerate(() if part.experts is None else part.experts.by_layer()):
            total = sum(one.tokens)
            busiest = sorted(range(len(one.tokens)), key=lambda x: -one.tokens[x])[:NUM_BUSIEST]
            shares = [f"{x:>5} ({one.tokens[x] / max(1, total):.1%})" for x in busiest]
            if place == 0:
                lines += [f"{part.name}: tokens by expert since its start", TABLE_HEAD]
            lines.append(f"{one.layer:>5} {total:>14,} {one.imbalance:>8.2f}  {''.join(shares)}")
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


def _lanes(timeline: Timeline) -> list[tuple[StagePart, str, list[Span]]]:
    """Return each part's lanes, with their spans in order, on the clock of the first part."""
    lanes = []
    for part in timeline.parts:
        gap_s = part.unix_s - timeline.parts[0].unix_s
        offset_s = 0.0 if abs(gap_s) < SAME_HOST_S else gap_s
        for lane in dict.fromkeys(track.lane for track in part.tracks):
            tracks = [track for track in part.tracks if track.lane == lane]
            spans = [span for track in tracks for span in _spans(track, offset_s)]
            lanes.append((part, lane, sorted(spans, key=lambda span: span.began_s)))
    return lanes


def _spans(track: Track, offset_s: float) -> Iterator[Span]:
    """Yield a track's spans, without rows that were never written."""
    names = [arg.name for arg in track.args]
    columns = (track.began_s, track.ended_s, *(arg.values for arg in track.args))
    for began_s, ended_s, *values in zip(*columns, strict=True):
        if began_s <= ended_s:  # false for NaN
            args = dict(zip(names, values, strict=True))
            yield Span(track.name, began_s + offset_s, ended_s + offset_s, args)


def _rows(spans: list[Span]) -> list[list[Span]]:
    """Lay out sorted spans in as few rows as possible without overlaps."""
    rows: list[list[Span]] = []
    for span in spans:
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
