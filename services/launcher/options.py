"""The options of `slipstream serve`, and what they mean as settings."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from services.launcher.counts import Counts

if TYPE_CHECKING:  # pydantic stays unloaded: `slipstream health` runs every few seconds
    from common.config import Tables

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

DESCRIPTION = """\
Serve a model over an OpenAI-compatible API. Without MODEL the small embedded demo model is served,
which needs no GPU and no network.
"""

EXAMPLES = """\
examples:
  slipstream serve                                 the demo, on http://127.0.0.1:8000/v1
  slipstream serve Qwen/Qwen3-0.6B                 a model of the Hugging Face hub
  slipstream serve ./my-model --port 9000          a folder with config.json and *.safetensors
  slipstream serve --computes 2 --tokenizers 2     several processes of a service
  slipstream serve --host 0.0.0.0                  reachable from other machines: set API keys,
                                                   SLIPSTREAM_ROUTER__API_KEYS=key1,key2

Each option is also a setting in a file (--config) and a variable in the environment:
--max-num-seqs 64 is max_num_seqs = 64 below [compute], and SLIPSTREAM_COMPUTE__MAX_NUM_SEQS=64.
An option goes over a variable, and a variable over the file.
"""


def positive(text: str) -> int:
    """Read a count that must be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1 (it is {text})")
    return value


def fraction(text: str) -> float:
    """Read a share that must be above 0 and at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"should be above 0 and at most 1 (it is {text})")
    return value


def amount(text: str) -> float:
    """Read a number that must not be negative."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"should be 0 or more (it is {text})")
    return value


positive.__name__, fraction.__name__, amount.__name__ = "count", "fraction", "number"


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add everything that `slipstream serve` takes; each `dest` is `table.field`."""
    parser.usage = "slipstream serve [MODEL] [options]"
    parser.add_argument_group("what to serve").add_argument(
        "model.path",
        nargs="?",
        metavar="MODEL",
        help="a folder in Hugging Face's layout, or the id of a model on its hub, which is "
        "downloaded (default: the embedded demo)",
    )
    _add_general(parser)
    _add_model(parser)
    _add_capacity(parser)
    group = parser.add_argument_group("how many processes", "each service scales on its own")
    for service, what in (
        ("tokenizer", "turn prompts into tokens"),
        ("compute", "run the model; on a machine with several GPUs each takes one, in turn"),
        ("detokenizer", "turn tokens into text"),
        ("router", "speak HTTP; all share one port"),
    ):
        group.add_argument(
            f"--{service}s",
            dest=f"count.{service}",
            type=positive,
            metavar="N",
            help=f"processes that {what} (default: 1)",
        )


def _add_general(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where and how")
    group.add_argument(
        "--host",
        dest="router.host",
        metavar="ADDRESS",
        help=f"where to listen; 0.0.0.0 is every address (default: {DEFAULT_HOST})",
    )
    group.add_argument(
        "--port",
        dest="router.port",
        type=int,
        metavar="PORT",
        help=f"port of the API; 0 picks a free one (default: {DEFAULT_PORT})",
    )
    group.add_argument("--config", metavar="FILE", help="settings as TOML")
    group.add_argument(
        "--log-level",
        dest="telemetry.log_level",
        choices=("debug", "info", "warning", "error"),
        help="(default: info)",
    )
    group.add_argument(
        "--traces",
        dest="telemetry.traces",
        metavar="TARGET",
        help="none, console, or the URL of an OTLP/HTTP collector (default: none)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model and where it runs")
    group.add_argument(
        "--served-model-name",
        dest="model.served_name",
        nargs="+",
        metavar="NAME",
        help="what clients call it; of several names answers have the first "
        "(default: the hub id or the folder's name)",
    )
    group.add_argument(
        "--device",
        dest="compute.device",
        choices=("auto", "cpu", "cuda", "sim"),
        help="auto takes a GPU if there is one; sim has no model at all, to test the rest under "
        "load (default: auto)",
    )
    group.add_argument(
        "--dtype",
        dest="compute.dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="number format of weights and activations (default: auto, the model's own where the "
        "device is fast at it)",
    )
    group.add_argument(
        "--pin",
        dest="compute.pin",
        choices=("auto", "on", "off"),
        help="give each thread that drives a GPU a processor core of its own, which all other "
        "threads and processes keep off; auto does where there are enough cores (default: auto)",
    )
    group.add_argument(
        "--load-format",
        dest="compute.load_format",
        choices=("auto", "dummy"),
        help="auto reads *.safetensors; dummy makes random weights (default: auto)",
    )


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits and memory")

    def add(option: str, kind: Any, metavar: str, text: str) -> None:
        field = option.removeprefix("--").replace("-", "_")
        group.add_argument(option, dest=f"compute.{field}", type=kind, metavar=metavar, help=text)

    add("--max-model-len", positive, "TOKENS", "longest prompt and answer (default: the model's)")
    add("--max-input-length", positive, "TOKENS", "longest prompt (default: max-model-len - 1)")
    add("--max-output-length", positive, "TOKENS", "longest answer (default: max-model-len - 1)")
    add("--max-num-seqs", positive, "N", "sequences computed at once (default: 256)")
    add(
        "--max-prefill-tokens",
        positive,
        "TOKENS",
        "prompt tokens of one step (default: 512 on the CPU, 8192 elsewhere)",
    )
    add(
        "--max-batched-token-mem",
        positive,
        "TOKENS",
        "tokens that the KV cache holds (default: what memory is left for)",
    )
    add(
        "--gpu-memory-utilization",
        fraction,
        "SHARE",
        "share of the GPU's memory to use (default: 0.9)",
    )
    add(
        "--swap-space",
        amount,
        "GIB",
        "host memory for sequences that have to wait (default: 0, they are computed anew)",
    )


def tables_of(options: argparse.Namespace) -> tuple[Tables, Counts]:
    """Return the settings and the counts that were given as options."""
    tables: Tables = {}
    for dest, value in vars(options).items():
        table, separator, field = dest.partition(".")
        if separator and value is not None:
            tables.setdefault(table, {})[field] = value
    return tables, Counts(**tables.pop("count", {}))
