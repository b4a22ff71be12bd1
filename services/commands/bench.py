"""`slipstream bench`: a server under load, as numbers."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import urllib.parse
from collections.abc import Mapping
from dataclasses import asdict, replace

from tqdm import tqdm

from common.host import raise_open_files_limit
from services.bench.client import ClientError, Clients, LoadResult, OfferedLoad, ServerAddress
from services.bench.figures import Figures, Spread, figures_of
from services.bench.workloads import (
    WORKLOADS,
    BenchRequest,
    Lengths,
    Workload,
    arrivals,
    completion,
    requests_of,
)
from services.commands.command import Command, Parser, api_key_of
from services.commands.server import DEFAULT_URL, Api, ServerError

DESCRIPTION = """\
Measure a server of OpenAI's API under load: many streamed completions of random
prompts, greedy and of fixed lengths. Nothing else should run on the server
meanwhile.

  A   1 stream, 4 requests of 128 tokens, answers of 512
  B   64 streams, 256 requests; prompts of 220 tokens in the mean, answers of
      200, both log-normal and at most 1,024
  C   256 streams, 1,024 requests of the same lengths"""
EXAMPLES = """\
examples:
  slipstream bench                                 the server here, workload B
  slipstream bench http://gpu-server:8000 -w A,B,C
  slipstream bench --rate 20 --requests 500        20 requests a second come at
                                                   random, however many are open
  slipstream bench -w B --json > figures.json
"""
SAMPLE = (
    "The quick brown fox jumps over the lazy dog while seven wizards pack my box with five dozen "
    "liquor jugs. In 1905 a clerk in Bern asked what it would be like to ride on a beam of light, "
    "and the answers changed how people think of time, space, matter and energy. Bread needs "
    "flour, water, salt and patience; a program needs a question, some data and a careful reader. "
)
WARM_UP_SHARE = 0.1
BUSY = 0.8  # of a core
COUNTS = ("concurrency", "requests", "prompt_tokens", "output_tokens", "processes")
SPREADS = (
    ("ttft", "to the first token"),
    ("itl", "between events"),
    ("tpot", "a token after the first"),
    ("latency", "the whole request"),
)


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="(default: %(default)s)")
    add("-w", "--workload", default="B", metavar="NAMES", help="A, B, C, S or several (B)")
    add("--concurrency", type=int, metavar="N", help="streams at once, in place of the workload's")
    add("--requests", type=int, metavar="N", help="requests, in place of the workload's")
    rate = "requests a second at random times (Poisson), in place of so many at once"
    add("--rate", type=float, metavar="R", help=rate)
    add("--prompt-tokens", type=int, metavar="N", help="prompts of exactly so many tokens")
    add("--output-tokens", type=int, metavar="N", help="answers of exactly so many tokens")
    add("--model", metavar="NAME", help="which model, where the server has several")
    parser.add_api_key()
    seed = "of lengths, prompts and arrivals (default: 1)"
    add("--seed", type=int, default=1, metavar="N", help=seed)
    add("--no-warm-up", action="store_true", help="measure from the first request on")
    add("--processes", type=int, default=2, metavar="N", help="processes that ask (default: 2)")
    within = "give up after so long (default: an hour)"
    add("--within", type=float, default=3600.0, metavar="SECONDS", help=within)
    add("--json", action="store_true", help="print JSON, a line for each workload")


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Measure each workload and print its figures; returns 1 if a request failed."""
    raise_open_files_limit()  # each stream has a connection
    try:
        workloads = [_workload(name, options) for name in options.workload.split(",")]
        bench = Bench(Api(options.url, api_key_of(options, env)), options)
        failed = 0
        for workload in workloads:
            figures = bench.measure(workload)
            failed += figures.num_failed
            json_or_table = bench.json_of(workload, figures) if options.json else report(figures)
            print(json_or_table, flush=True)
        return 1 if failed else 0
    except (ServerError, ClientError, ValueError) as error:
        sys.stderr.write(f"slipstream bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nslipstream bench: interrupted; nothing was measured to the end\n")
        return 130


def _workload(name: str, options: argparse.Namespace) -> Workload:
    """Return a workload with the changes that the options make, or raise ValueError."""
    if (workload := WORKLOADS.get(name.strip().upper())) is None:
        raise ValueError(f"there is no workload {name}; there are {', '.join(WORKLOADS)}")
    for count in COUNTS:
        if (value := getattr(options, count)) is not None and value < 1:
            raise ValueError(f"--{count.replace('_', '-')} should be at least 1 (it is {value})")
    if options.rate is not None and not 0 < options.rate < float("inf"):
        raise ValueError(f"--rate should be above 0 (it is {options.rate})")
    if options.prompt_tokens:
        workload = replace(workload, prompt=Lengths(options.prompt_tokens))
    if options.output_tokens:
        workload = replace(workload, output=Lengths(options.output_tokens))
    num_requests = options.requests or workload.num_requests
    concurrency = min(options.concurrency or workload.concurrency, num_requests)
    return replace(workload, num_requests=num_requests, concurrency=concurrency)


class Bench:
    def __init__(self, api: Api, options: argparse.Namespace) -> None:
        self._api = api
        self._options = options
        self.model = api.target(options.model).model
        self._ids, self._max_model_len = self._vocabulary()

    def measure(self, workload: Workload) -> Figures:
        """Run a workload, after a warm-up with a tenth of its requests and other prompts."""
        options = self._options
        if sys.stderr.isatty():
            load = describe(workload, options.rate)
            sys.stderr.write(f"{self.model} at {self._api.url}, {load}\n")
        if not options.no_warm_up:
            share = workload.scaled(WARM_UP_SHARE)
            self._run(share, self._requests(share, repeat=1), "warming up", None)
        requests = self._requests(workload)
        return figures_of(requests, self._run(workload, requests, "measuring", options.rate))

    def json_of(self, workload: Workload, figures: Figures) -> str:
        document = {
            "url": self._api.url,
            "model": self.model,
            "workload": asdict(workload),
            "rate": self._options.rate,
            "seed": self._options.seed,
            "tokens_per_s": figures.tokens_per_s,
            "requests_per_s": figures.requests_per_s,
            **asdict(figures),
        }
        return json.dumps(document)

    def _vocabulary(self) -> tuple[list[int], int]:
        """Return ids of ordinary words, for prompts of exact lengths, and the context's length."""
        body = {"model": self.model, "prompt": SAMPLE, "add_special_tokens": False}
        try:
            answer = self._api.call("POST", "/tokenize", body)
            ids = sorted({int(token) for token in answer["tokens"]})
            return ids, int(answer.get("max_model_len") or 0)
        except (ServerError, KeyError, TypeError, ValueError):
            return [], 0

    def _requests(self, workload: Workload, repeat: int = 0) -> list[BenchRequest]:
        """Return the requests, cut to the model's context."""
        words = SAMPLE.split()
        vocabulary = self._ids or range(len(words))
        requests = requests_of(workload, self._options.seed, repeat, vocabulary)
        half = max(1, self._max_model_len // 2 - 1)
        for request in requests:
            if not self._ids:  # lengths are in words then: about as many as tokens
                request.text = " ".join(words[number] for number in request.prompt_ids)
            if self._max_model_len:
                del request.prompt_ids[half:]
                request.max_tokens = min(request.max_tokens, half)
        return requests

    def _run(
        self, workload: Workload, requests: list[BenchRequest], phase: str, rate: float | None
    ) -> LoadResult:
        endpoint = self._endpoint()
        bodies = (completion(self.model, request) for request in requests)
        load = OfferedLoad(
            tuple(endpoint.post("/v1/completions", body) for body in bodies),
            workload.concurrency,
            tuple(arrivals(rate, len(requests), self._options.seed)) if rate else (),
        )
        clients = Clients(endpoint, load, self._options.processes)
        bar = tqdm(
            total=len(requests), desc=phase, unit=" requests", leave=False, disable=None, ncols=79
        )
        with contextlib.closing(clients), bar:
            return clients.run(self._options.within, lambda done: bar.update(done - bar.n))

    def _endpoint(self) -> ServerAddress:
        parts = urllib.parse.urlsplit(self._api.url)
        secure = parts.scheme == "https"
        key = self._api.headers.get("Authorization")
        return ServerAddress(
            parts.hostname or "",
            parts.port or (443 if secure else 80),
            secure,
            parts.path,
            (("Authorization", key),) if key else (),
        )


def describe(workload: Workload, rate: float | None) -> str:
    how = f"{rate:g} a second at random" if rate else f"{workload.concurrency} at once"
    return f"workload {workload.name}: {workload.num_requests:,} requests, {how}"


def report(figures: Figures) -> str:
    """Return the figures as a table of 80 columns."""
    lines = [f"\n{'milliseconds':<24}{'mean':>12}{'p50':>12}{'p90':>12}{'p99':>12}"]
    for name, what in SPREADS:
        spread: Spread = getattr(figures, name)
        cells = (spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s)
        lines.append(f"{what:<24}" + "".join(f"{1e3 * cell:>12,.2f}" for cell in cells))
    cached = f", {figures.cached_tokens:,} of them from its cache" if figures.cached_tokens else ""
    lines += [
        "",
        f"requests  {figures.num_requests:>12,} answered in {figures.wall_s:,.1f} s, "
        f"{figures.requests_per_s:,.1f} a second; {figures.num_failed or 'none'} failed",
        f"tokens    {figures.output_tokens:>12,} written, {figures.tokens_per_s:,.0f} a second",
        f"          {figures.prompt_tokens:>12,} read{cached}",
    ]
    if figures.client_share > BUSY:
        lines.append(
            f"The clients were {figures.client_share:.0%} busy and may have limited the figures: "
            "raise --processes."
        )
    return "\n".join([*lines, *figures.problems])


COMMANDS = {"bench": Command(DESCRIPTION, run, add_options, EXAMPLES)}
