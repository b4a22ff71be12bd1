"""`slipstream serve`: a model over HTTP.

Most options are settings: the field gives the type, the bounds, the default and the help.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from common.config import Settings, Tables, complaint_about
from services.commands.command import Command, Parser
from services.launcher.autoscale import CountRange, count_ranges
from services.launcher.plan import SETTINGS, Counts, make_plan
from services.launcher.replicas import ScaleError

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
  slipstream serve ./model-Q4_K_M.gguf          a GGUF file
  slipstream serve --computes 2 --tokenizers 2  several processes of a service
  slipstream serve MODEL -tp 2 -dp 4            four copies, on two GPUs each
  slipstream serve --host 0.0.0.0               for other machines; set keys:
                                         SLIPSTREAM_ROUTER__API_KEYS=key1,key2

Each option is also a setting in a file (--config) and a variable in the
environment: --max-num-seqs 64 is max_num_seqs = 64 below [compute], and
SLIPSTREAM_COMPUTE__MAX_NUM_SEQS=64. An option goes over a variable, and a
variable over the file.
"""

MORE = {"compute": ("--data-parallel-size", "-dp")}  # names of the option elsewhere
# What to use instead of options of vLLM, SGLang and llama.cpp that do not exist here.
INSTEAD = {
    "-m": "give the model without an option: slipstream serve MODEL",
    "--model": "give the model without an option: slipstream serve MODEL",
    "--model-path": "give the model without an option: slipstream serve MODEL",
    "--max-num-batched-tokens": "use --max-prefill-tokens for the prompt tokens of one step",
    "--chunked-prefill-size": "use --max-prefill-tokens for the prompt tokens of one step",
    "--enable-chunked-prefill": "long prompts are always computed in chunks",
    "--enable-prefix-caching": "leave it out: prefixes are shared by default",
    "--no-enable-prefix-caching": "write prefix_cache = false below [compute] in a --config file",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--context-length": "use --max-model-len",
    "-c": "use --max-model-len",
    "--ctx-size": "use --max-model-len",
    "--max-running-requests": "use --max-num-seqs",
    "--block-size": "write page_tokens below [compute] in a --config file",
    "--enforce-eager": "a GPU's steps are always recorded as graphs",
    "--trust-remote-code": "code that comes with a model is never run",
    "--tokenizer": "the tokenizer is read from the model's folder",
    "--enable-auto-tool-choice": "leave it out: the chat template says how calls look",
    "--tool-call-parser": "the format is read off the model's chat template; tool_format below "
    "[tokenizer] in a --config file sets it",
    "--reasoning-parser": "the format is read off the model's chat template; reasoning_format "
    "below [tokenizer] in a --config file sets it",
    "--eplb-config": "use --enable-eplb and --num-redundant-experts N",
    "--enable-lora": "LoRA adapters are not served yet",
}


def add_options(parser: Parser) -> None:
    parser.usage = "slipstream serve [MODEL] [options]"
    group = parser.add_argument_group("what to serve")
    add_setting(group, "model.path", "model.path", nargs="?", metavar="MODEL")
    _add_general(parser)
    _add_model(parser)
    _add_capacity(parser)
    group = parser.add_argument_group("how many processes", "each service scales on its own")
    for service in Counts.model_fields:
        add_setting(group, f"count.{service}", f"--{service}s", *MORE.get(service, ()), metavar="N")
    about = "scales services by itself, as in tokenizers=1..4,detokenizers=1..2"
    group.add_argument("--autoscale", type=scaled, metavar="SERVICE=N..M,…", help=about)


def _add_general(parser: Parser) -> None:
    group = parser.add_argument_group("where and how")
    add_setting(group, "router.host", metavar="ADDRESS")
    add_setting(group, "router.port", metavar="PORT")
    keys = {"action": "append", "type": api_key, "metavar": "KEY"}
    about = (
        "clients have to send it; may be given several times. It can be seen in the machine's list "
        "of processes, where SLIPSTREAM_ROUTER__API_KEYS cannot"
    )
    add_setting(group, "router.api_keys", "--api-key", **keys, help=about)
    group.add_argument("--config", metavar="FILE", help="settings as TOML")
    about = "what starts the processes and supervises them (default: this command, on this host)"
    group.add_argument("--on", choices=("ray",), help=about)
    add_setting(group, "ray.address", metavar="HOST:PORT")
    levels = ("debug", "info", "warning", "error")
    add_setting(group, "telemetry.log_level", choices=levels, help="(default: info)")
    add_setting(group, "telemetry.traces", metavar="TARGET")


def _add_model(parser: Parser) -> None:
    group = parser.add_argument_group("the model and where it runs")
    names = {"nargs": "+", "type": str, "metavar": "NAME"}
    add_setting(group, "model.served_name", "--served-model-name", **names)
    add_setting(group, "tokenizer.chat_template", type=readable, metavar="FILE")
    for name in ("device", "dtype", "kv_cache_dtype", "quantization", "pin", "load_format"):
        add_setting(group, f"compute.{name}")
    add_setting(group, "compute.tensor_parallel_size", "--tensor-parallel-size", "-tp", metavar="N")
    sizes = "--pipeline-parallel-size", "-pp"
    add_setting(group, "compute.pipeline_parallel_size", *sizes, metavar="N")
    sizes = "--prefill-context-parallel-size", "-pcp"
    add_setting(group, "compute.prefill_context_parallel_size", *sizes, metavar="N")
    on_off: Any = {"action": argparse.BooleanOptionalAction}
    add_setting(
        group, "compute.enable_expert_parallel", "--enable-expert-parallel", "-ep", **on_off
    )
    add_setting(group, "compute.num_redundant_experts", metavar="N")
    add_setting(group, "compute.enable_eplb", **on_off)
    config = "--speculative-config", "-sc"
    add_setting(group, "compute.speculative_config", *config, metavar="auto|off|JSON")


def _add_capacity(parser: Parser) -> None:
    group = parser.add_argument_group("limits and memory")
    for name in ("max_model_len", "max_input_length", "max_output_length"):
        add_setting(group, f"compute.{name}", metavar="TOKENS")
    add_setting(group, "compute.max_num_seqs", metavar="N")
    for name in ("max_prefill_tokens", "max_batched_token_mem"):
        add_setting(group, f"compute.{name}", metavar="TOKENS")
    add_setting(group, "compute.gpu_memory_utilization", metavar="SHARE")
    add_setting(group, "compute.swap_space", metavar="GIB")


def add_setting(group: Any, setting: str, *options: str, **more: Any) -> None:
    """Add the option for a setting, `table.field`, which becomes its `dest`; it may have several
    names."""
    table, _, name = setting.partition(".")
    kind = Counts if table == "count" else SETTINGS[table]
    field = kind.model_fields[name]
    if get_origin(field.annotation) is Literal:
        more["choices"] = get_args(field.annotation)
    elif "choices" not in more and "action" not in more:
        more.setdefault("type", reader_of(kind, name))
    about = field.description or ""
    if "(default: " not in about and field.default != "":
        about += f" (default: {field.default})"
    more.setdefault("help", about)
    if options != (setting,):  # a positional argument has no other name
        more["dest"] = setting
    group.add_argument(*(options or (f"--{name.replace('_', '-')}",)), **more)


def reader_of(kind: type[Settings], name: str) -> Callable[[str], Any]:
    """Return a function that reads a field's value as in a settings file."""

    def read(text: str) -> Any:
        try:
            return getattr(kind.model_validate({name: text}), name)
        except ValidationError as error:
            (problem,) = error.errors()
            raise argparse.ArgumentTypeError(complaint_about(problem)) from None

    return read


def api_key(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; no client could send it")
    return text.strip()


def readable(text: str) -> str:
    try:
        with open(text, "rb"):
            return os.path.abspath(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror}") from error


def scaled(text: str) -> dict[str, CountRange]:
    try:
        return count_ranges(text)
    except ScaleError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tables_of(options: argparse.Namespace) -> tuple[Tables, Counts]:
    tables: Tables = {}
    for dest, value in vars(options).items():
        table, separator, field = dest.partition(".")
        if separator and value is not None:
            tables.setdefault(table, {})[field] = value
    return tables, Counts(**tables.pop("count", {}))


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from common.errors import ConfigError, ModelError
    from services.launcher.launch import launch
    from services.launcher.on_ray.launch import launch_on_ray

    try:
        plan = make_plan(options.config, env, *tables_of(options), options.autoscale)
        return launch_on_ray(plan, env) if options.on == "ray" else launch(plan, env)
    except (ConfigError, ModelError) as error:
        sys.stderr.write(f"slipstream serve: {error}\n")
        return 2
    except KeyboardInterrupt:  # during a download
        return 130


COMMANDS = {"serve": Command(DESCRIPTION, run, add_options, EXAMPLES, INSTEAD)}
