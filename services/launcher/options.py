"""The options of `slipstream serve`, and what they mean as settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from common.config import MAX_NUM_SEQS, MAX_STEP_TOKENS, Tables
from services.launcher.plan import Counts

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
MAX_PROCESSES = 256  # of one service on one host
DEVICES = ("auto", "cpu", "cuda", "sim")

DESCRIPTION = """\
Serve a model over an OpenAI-compatible API. Without MODEL the small embedded
demo model is served, which needs no GPU and no network.
"""

EXAMPLES = """\
examples:
  slipstream serve                              the demo, on port 8000
  slipstream serve Qwen/Qwen3-0.6B              a model of the Hugging Face hub
  slipstream serve ./my-model --port 9000       a folder with config.json and
                                                *.safetensors
  slipstream serve --computes 2 --tokenizers 2  several processes of a service
  slipstream serve --host 0.0.0.0               for other machines; set keys:
                                         SLIPSTREAM_ROUTER__API_KEYS=key1,key2

Each option is also a setting in a file (--config) and a variable in the
environment: --max-num-seqs 64 is max_num_seqs = 64 below [compute], and
SLIPSTREAM_COMPUTE__MAX_NUM_SEQS=64. An option goes over a variable, and a
variable over the file.
"""


INSTEAD = {
    "--model": "give the model without an option: slipstream serve MODEL",
    "--model-path": "give the model without an option: slipstream serve MODEL",
    "--quantization": "quantised weights are not served yet. A model too large for the memory "
    "may fit in fewer bits a number, --dtype bfloat16, or take a smaller one",
    "--pipeline-parallel-size": "several GPUs for one model are not supported yet; --computes N "
    "runs N copies of it, each on a GPU of its own",
    "--data-parallel-size": "use --computes N: so many copies, each on a GPU of its own",
    "--max-num-batched-tokens": "use --max-prefill-tokens for the prompt tokens of one step",
    "--chunked-prefill-size": "use --max-prefill-tokens for the prompt tokens of one step",
    "--enable-chunked-prefill": "long prompts are always computed in chunks",
    "--enable-prefix-caching": "prefixes are always shared; [compute] prefix_cache = false in a "
    "--config file ends it",
    "--no-enable-prefix-caching": "write prefix_cache = false below [compute] in a --config file",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--context-length": "use --max-model-len",
    "--ctx-size": "use --max-model-len",
    "--max-running-requests": "use --max-num-seqs",
    "--block-size": "write page_tokens below [compute] in a --config file",
    "--enforce-eager": "a GPU's steps are always recorded as graphs",
    "--trust-remote-code": "code that comes with a model is never run",
    "--tokenizer": "the tokenizer is read from the model's folder",
    "--enable-auto-tool-choice": "tool calls need no option; their format is read off the model's "
    "chat template",
    "--tool-call-parser": "the format is read off the model's chat template; tool_format below "
    "[tokenizer] in a --config file sets it",
    "--reasoning-parser": "the format is read off the model's chat template; reasoning_format "
    "below [tokenizer] in a --config file sets it",
    "--enable-lora": "LoRA adapters are not served yet",
    "--speculative-config": "speculative decoding is not there yet",
}
"""What there is instead of options that users of vLLM, SGLang and llama.cpp type."""


def one_gpu(text: str) -> int:
    """Read the number of GPUs for one model, which can only be 1."""
    if int(text) != 1:
        raise argparse.ArgumentTypeError(
            "several GPUs for one model are not supported yet; --computes N runs N copies of it, "
            "each on a GPU of its own"
        )
    return 1


def api_key(text: str) -> str:
    """Take a key that a client can send."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; nobody could send it")
    return text.strip()


def readable(text: str) -> str:
    """Take the path of a file that can be read."""
    try:
        with open(text, "rb"):
            return os.path.abspath(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror}") from error


def positive(text: str) -> int:
    """Read a count that must be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1 (it is {text})")
    return value


def up_to(limit: int) -> Callable[[str], int]:
    """Make what reads a count that has a limit."""

    def count(text: str) -> int:
        value = positive(text)
        if value > limit:
            raise argparse.ArgumentTypeError(f"should be at most {limit} (it is {text})")
        return value

    return count


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
one_gpu.__name__ = "count"


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
            type=up_to(MAX_PROCESSES),
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
    group.add_argument(
        "--api-key",
        dest="router.api_keys",
        action="append",
        type=api_key,
        metavar="KEY",
        help="clients have to send it; may be given several times. It can be seen in the "
        "machine's list of processes, where SLIPSTREAM_ROUTER__API_KEYS cannot",
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
        "--chat-template",
        dest="tokenizer.chat_template",
        type=readable,
        metavar="FILE",
        help="a Jinja template to use in place of the model's own",
    )
    group.add_argument(
        "--device",
        dest="compute.device",
        choices=DEVICES,
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

    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=one_gpu,
        metavar="1",
        help="GPUs for one model: 1, as long as there is no more (see --computes)",
    )


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits and memory")

    def add(option: str, kind: Any, metavar: str, text: str) -> None:
        field = option.removeprefix("--").replace("-", "_")
        group.add_argument(option, dest=f"compute.{field}", type=kind, metavar=metavar, help=text)

    add("--max-model-len", positive, "TOKENS", "longest prompt and answer (default: the model's)")
    add("--max-input-length", positive, "TOKENS", "longest prompt (default: max-model-len - 1)")
    add("--max-output-length", positive, "TOKENS", "longest answer (default: max-model-len - 1)")
    add("--max-num-seqs", up_to(MAX_NUM_SEQS), "N", "sequences computed at once (default: 256)")
    add(
        "--max-prefill-tokens",
        up_to(MAX_STEP_TOKENS),
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
