"""A server of one host that scales itself, within ranges, as its routers find it should."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import structlog

from services.launcher.replicas import Replicas, ScaleError, check_count, service_named

LOOK_S = 5.0
PAUSE_S = 60.0  # after a process that was added could not start


class CountRange(NamedTuple):
    """Fewest and most processes of a service."""

    least: int
    most: int

    def nearest(self, count: int) -> int:
        return min(max(count, self.least), self.most)

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"


def count_ranges(text: str) -> dict[str, CountRange]:
    """Read `tokenizers=1..4,compute=1..2`; ScaleError says what is wrong."""
    ranges = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+)=(\d{1,4})\.\.(\d{1,4})\s*", part)
        if match is None:
            raise ScaleError(f"{part}: should be SERVICE=N..M, such as tokenizers=1..4")
        service, found = service_named(match[1]), CountRange(int(match[2]), int(match[3]))
        for count in found:
            check_count(service, count)
        if found.least > found.most:
            raise ScaleError(f"{part}: the first number is above the second")
        ranges[service] = found
    return ranges


class Autoscaler:
    """Replicas of which some are scaled by what `desired` says; others scale the rest.

    `desired` raises OSError or ValueError where nothing can be known.
    """

    def __init__(
        self,
        replicas: Replicas,
        ranges: Mapping[str, CountRange],
        desired: Callable[[], Awaitable[Mapping[str, int]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._ranges = ranges
        self._desired = desired
        self._clock = clock
        self._set: dict[str, int] = {}
        self._paused_until_s: dict[str, float] = {}
        self._log = structlog.get_logger()

    def count(self, service: str) -> int:
        return self._replicas.count(service)

    async def scale(self, service: str, count: int) -> None:
        if service in self._ranges:
            found = self._ranges[service]
            raise ScaleError(f"{service} is scaled by --autoscale, which keeps it in {found}")
        await self._replicas.scale(service, count)

    async def run(self) -> None:
        """Adjust the counts every few seconds until this is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.adjust()
            except (OSError, ValueError, ScaleError) as error:
                self._log.debug("not scaled", why=str(error))

    async def adjust(self) -> None:
        """Bring each service to the desired count, or the nearest in its range."""
        if not self._ranges:
            return
        desired, now_s = await self._desired(), self._clock()
        for service, found in self._ranges.items():
            count = self._replicas.count(service)
            if count < self._set.get(service, 0):  # the last one was given up: it would be again
                self._paused_until_s[service] = now_s + PAUSE_S
            self._set[service] = count
            wanted = found.nearest(desired.get(service, count))
            if wanted != count and now_s >= self._paused_until_s.get(service, now_s):
                await self._replicas.scale(service, wanted)
                self._set[service] = wanted
