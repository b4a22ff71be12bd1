"""What steps took, on the host and on the device, and when the one on the device will end."""

from __future__ import annotations

import struct
from array import array
from math import isnan, nan
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from common.messages.queries import Track, TrackArg
from services.compute.step import StepPlan

CAPACITY = 8192  # steps: 1 MiB, and more than five seconds of the shortest steps
WINDOW = 1024  # steps that percentiles and the idle share are taken over
TIMES_INTERVAL_S = 0.5  # between two looks at them, a heartbeat's: each takes 0.1 ms
SMOOTHING = 0.2
MARGIN_S = 0.0003  # beside the host's slow time; a timer of the loop overshoots by about 0.1 ms

_LAUNCH = ("step_id", "decode_rows", "prefill_tokens", "samples", "rested")
_TIMES = ("plan_s", "launch_s", "launched_s", "wait_s", "commit_s", "committed_s")
_DRAFTS = ("drafted", "accepted", "wasted")
_REST = ("send_s", "sent_s", "slept_s", "device_start_s", "device_end_s")
_RECORD = np.dtype([(name, np.float64) for name in _LAUNCH + _TIMES + _DRAFTS + _REST])
_ROW_BYTES = _RECORD.itemsize
_LAUNCHED, _TAKEN, _SENT, _DEVICE = (struct.Struct(f"{size}d") for size in (8, 6, 3, 2))
_UNKNOWN = struct.pack("d", nan) * (_ROW_BYTES // 8)
_TAKEN_AT, _SENT_AT, _DEVICE_AT = (
    8 * (_RECORD.names or ()).index(name) for name in ("wait_s", "send_s", "device_start_s")
)
_HOST_PHASES = {  # name: column of its begin, column of its end
    "plan": ("plan_s", "launch_s"),
    "launch": ("launch_s", "launched_s"),
    "wait": ("wait_s", "commit_s"),
    "commit": ("commit_s", "committed_s"),
    "send": ("send_s", "sent_s"),
}
_SIZES = tuple(name for name in _LAUNCH if name != "rested")
_ARGS = {"plan": _SIZES, "step": (*_SIZES, *_DRAFTS)}  # what tracks show; others only the step's id

Column: TypeAlias = npt.NDArray[np.float64]
Records: TypeAlias = npt.NDArray[np.void]  # of _RECORD: rows["plan_s"] is a column


class StepRecords:
    """The last steps, oldest first, on the host's monotonic clock; NaN is what is not known (yet).

    Noting a step costs one to two microseconds (a row of doubles, written in four pieces); rows are
    evaluated on demand, never by a step. `rested` is 1 for a step after a time without work: the
    gap before it is not idle time. `slept_s` is how long the loop slept since the last send.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._data = bytearray(_UNKNOWN * capacity)
        self._table = np.frombuffer(self._data, _RECORD)
        self._num_launched = 0
        self._last_taken = -1
        self._rested = True
        self._times: tuple[tuple[str, float, float], ...] = ()
        self._idle_ratio: float | None = None
        self._looked_at_s = -TIMES_INTERVAL_S

    def rested(self) -> None:
        self._rested = True

    def launched(self, plan: StepPlan, began_s: float, planned_s: float, launched_s: float) -> int:
        """Note a step that is on the device now; returns its number, for the other notes."""
        number = self._num_launched
        self._num_launched = number + 1
        num_decode_rows = plan.num_decode_rows
        num_prefill_tokens = len(plan.tokens) - num_decode_rows
        num_samples = len(plan.sample_row)
        at = number % self._capacity * _ROW_BYTES
        sizes = (plan.step_id, num_decode_rows, num_prefill_tokens, num_samples, self._rested)
        _LAUNCHED.pack_into(self._data, at, *sizes, began_s, planned_s, launched_s)
        self._data[at + _LAUNCHED.size : at + _ROW_BYTES] = _UNKNOWN[_LAUNCHED.size :]
        self._rested = False
        return number

    def taken(
        self,
        number: int,
        began_s: float,
        waited_s: float,
        committed_s: float,
        num_drafts: int = 0,
        num_accepted: int = 0,
    ) -> None:
        drafts = num_drafts, num_accepted, num_drafts - num_accepted
        at = number % self._capacity * _ROW_BYTES + _TAKEN_AT
        _TAKEN.pack_into(self._data, at, began_s, waited_s, committed_s, *drafts)
        self._last_taken = number

    def on_device(self, number: int, start_s: float, end_s: float) -> None:
        at = number % self._capacity * _ROW_BYTES + _DEVICE_AT
        _DEVICE.pack_into(self._data, at, start_s, end_s)

    def sent(self, began_s: float, sent_s: float, slept_s: float) -> None:
        if self._last_taken >= 0:
            at = self._last_taken % self._capacity * _ROW_BYTES + _SENT_AT
            _SENT.pack_into(self._data, at, began_s, sent_s, slept_s)
            self._last_taken = -1

    def last(self, count: int) -> Records:
        first = max(0, self._num_launched - min(count, self._capacity))
        return self._table[np.arange(first, self._num_launched) % self._capacity]

    def times(self, now_s: float) -> tuple[tuple[str, float, float], ...]:
        """Return (name, median, 99th percentile) of phases, host cycle and device, in seconds.

        `host` is the cycle from the end of one send to the end of the next, less what the host
        waited or slept in between. The values are at most half a second old.
        """
        self._look(now_s)
        return self._times

    def device_idle_ratio(self, now_s: float) -> float | None:
        self._look(now_s)
        return self._idle_ratio

    def tracks(self, since_s: float) -> tuple[Track, ...]:
        rows = self.last(self._capacity)
        rows = rows[rows["plan_s"] >= since_s]
        columns = {name: array("d", rows[name].tobytes()) for name in _RECORD.fields or ()}
        args = {name: TrackArg(name, columns[name]) for name in (*_SIZES, *_DRAFTS)}
        spans = [("host", name, *places) for name, places in _HOST_PHASES.items()]
        spans.append(("device", "step", "device_start_s", "device_end_s"))
        return tuple(
            Track(
                *(lane, name, columns[begin], columns[end]),
                tuple(args[each] for each in _ARGS.get(name, _SIZES[:1])),
            )
            for lane, name, begin, end in spans
        )

    def _look(self, now_s: float) -> None:
        if now_s - self._looked_at_s < TIMES_INTERVAL_S:
            return
        self._looked_at_s = now_s
        rows = self.last(WINDOW)
        durations = {name: rows[end] - rows[begin] for name, (begin, end) in _HOST_PHASES.items()}
        durations["host"] = _host_cycles(rows)
        durations["device"] = rows["device_end_s"] - rows["device_start_s"]
        found = ((name, *_percentiles(seconds)) for name, seconds in durations.items())
        self._times = tuple((name, p50, p99) for name, p50, p99 in found if not isnan(p50))
        self._idle_ratio = _idle_ratio(rows)


def _host_cycles(rows: Records) -> Column:
    cycles = rows["sent_s"][1:] - rows["sent_s"][:-1]
    waited = rows["commit_s"] - rows["wait_s"] + rows["slept_s"]
    busy: Column = cycles - waited[1:]
    return np.where(rows["rested"][1:] > 0, nan, busy)


def _idle_ratio(rows: Records) -> float | None:
    start_s, end_s = rows["device_start_s"], rows["device_end_s"]
    gaps = np.where(rows["rested"][1:] > 0, 0.0, start_s[1:] - end_s[:-1])
    idle_s = float(np.nansum(np.maximum(gaps, 0.0)))
    busy_s = float(np.nansum(end_s - start_s))
    return idle_s / (idle_s + busy_s) if busy_s > 0 else None


def _percentiles(seconds: Column) -> tuple[float, float]:
    known = np.sort(seconds[~np.isnan(seconds)])
    if not len(known):
        return nan, nan
    last = len(known) - 1
    return float(known[round(0.5 * last)]), float(known[round(0.99 * last)])


class StepTimer:
    """Predicts when the running step ends and how long the host needs to plan the next: as late as
    the device allows, so that new requests still get on it.

    Durations are learned per kind of step (`step_kind`). A kind not seen yet is predicted to take
    no time, so that the next step is launched at once.
    """

    def __init__(self) -> None:
        self._duration_s: dict[tuple[int, int], float] = {}
        self._host_s = 0.001
        self._mean_host_s = self._mean_sampling_s = 0.0
        self._last_end_s = 0.0

    def end_s(self, kind: tuple[int, int], launched_s: float) -> float:
        return max(launched_s, self._last_end_s) + self._duration_s.get(kind, 0.0)

    def launch_at_s(self, kind: tuple[int, int], launched_s: float) -> float:
        return self.end_s(kind, launched_s) - self._host_s - MARGIN_S

    def sample_at_s(self, kind: tuple[int, int], launched_s: float) -> float:
        """When a sampling is due for the next step to be launched before this one ends.

        Nothing is slept for that near to it, so that the usual time is enough.
        """
        return self.end_s(kind, launched_s) - self._mean_host_s - self._mean_sampling_s

    def step_s(self, kind: tuple[int, int]) -> float:
        return self._duration_s.get(kind, 0.0)

    def ended(
        self, kind: tuple[int, int], launched_s: float, end_s: float, sampled_s: float | None = None
    ) -> None:
        """Learn from a step that ended (or was seen to have ended) at `end_s`.

        `sampled_s` is when its sampling was launched, if later than the forward pass.
        """
        began_s = max(launched_s, self._last_end_s)
        self._last_end_s = end_s
        duration_s = end_s - began_s
        known_s = self._duration_s.get(kind)
        if sampled_s is not None and end_s - sampled_s < MARGIN_S:
            # The device may have waited for the sampling, and that for what is predicted here: to
            # learn the wait would make the next one longer. That it takes no longer is known.
            if known_s is None:
                return
            duration_s = min(known_s, duration_s)
        # Falls at once, rises slowly: planning too late idles the device, too early costs nothing
        # but a new request's place.
        if known_s is None or duration_s < known_s:
            self._duration_s[kind] = duration_s
        else:
            self._duration_s[kind] = known_s + SMOOTHING * (duration_s - known_s)

    def host_took(self, host_s: float) -> None:
        """Learn what plan and launch cost: rises at once, falls slowly (a stand-in for the p99)."""
        self._mean_host_s += 0.1 * (host_s - self._mean_host_s)
        if host_s > self._host_s:
            self._host_s = host_s
        else:
            self._host_s += 0.02 * (host_s - self._host_s)

    def sampling_took(self, host_s: float) -> None:
        self._mean_sampling_s += 0.1 * (host_s - self._mean_sampling_s)


def step_kind(num_decode_rows: int, num_prefill_tokens: int) -> tuple[int, int]:
    return num_decode_rows.bit_length(), num_prefill_tokens.bit_length()
