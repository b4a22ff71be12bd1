"""`slipstream pull`, `list` and `rm`: models in the cache that the Hugging Face hub's tools use."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ModelError, near
from services.commands.command import Command, Parser

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

PULL = """\
Download a model from the Hugging Face hub, or what is missing of it, into the
hub's cache. Only what is served is fetched: safetensors, no pickles, no code.
A gated model needs a token, by `hf auth login` or in HF_TOKEN."""
LIST = """\
List the models in the cache of the Hugging Face hub, their size on the disk,
when they were used, and whether they can be served: of GGUF files, each by its
own command."""
REMOVE = """\
Remove models, in all their revisions, from the cache of the Hugging Face hub.
Other programs that use the cache do not find them any more either."""
UNITS = ("B", "kB", "MB", "GB", "TB")
DAY_S = 86400


def add_pull_options(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="its id, such as Qwen/Qwen3-0.6B")
    parser.add_argument("--revision", default="", metavar="NAME", help="a branch, tag or commit")
    parser.add_argument(
        "--force", action="store_true", help="fetch the weights even of a model not served here"
    )


def pull(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Download a model, unless its small files say that it cannot be served."""
    from common.config import may_be_hub_id
    from common.decoder_shape import read_shape
    from common.model_folder import read_model_config
    from common.tokenizer_file import needed_tokenizer_file
    from services.launcher.model import download

    try:
        if not may_be_hub_id(options.model):
            raise ModelError(f"{options.model} is no id of a model; one looks like Qwen/Qwen3-0.6B")
        folder = download(options.model, options.revision, with_weights=False)
        if not options.force:
            read_shape(read_model_config(folder))
            needed_tokenizer_file(folder)
        folder = download(options.model, options.revision, with_weights=True)
    except ModelError as error:
        sys.stderr.write(f"slipstream pull: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nWhat has come is kept; the same command goes on from there.\n")
        return 130
    print(folder)
    if sys.stdout.isatty():
        print(f"`slipstream chat {options.model}` talks with it.")
    return 0


def add_list_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def list_models(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from common.host import cache_folder
    from common.made_folder import usage

    models = [(model, *served(model)) for model in cached_models()]
    if options.json:
        rows = [row_of(*each) for each in models]
        print(json.dumps(rows, indent=2))
        return 0
    if models:
        print_table(models)
    else:
        print("No model is downloaded. `slipstream pull Qwen/Qwen3-0.6B` fetches one, and the")
        print("demo model is always there: `slipstream chat`.")
    for name, kind in (("gguf", "GGUF file"), ("tokenizers", "tiktoken file")):
        cache = cache_folder(name, env)
        count, num_bytes = usage(cache)
        if count:
            what = f"a {kind}" if count == 1 else f"{count} {kind}s"
            print(f"What was read of {what} takes {size_text(num_bytes)} in {cache}.")
    return 0


def print_table(models: Sequence[tuple[CachedRepoInfo, str, Mapping[Path, str]]]) -> None:
    """Print models, why each cannot be served, and the same of its GGUF files."""
    width = max(len("MODEL"), *(len(model.repo_id) for model, *_ in models))
    print(f"{'MODEL':<{width}}  {'SIZE':>8}  {'USED':<12}  SERVED")
    for model, reason, files in models:
        used = age_text(model.last_accessed)
        size = size_text(model.size_on_disk)
        answer = f"no: {reason}" if reason else "yes, by file:" if files else "yes"
        print(f"{model.repo_id:<{width}}  {size:>8}  {used:<12}  {answer}")
        for path, why_not in files.items():
            command = f"slipstream serve {shlex.quote(str(path))}"
            print(f"  not {path.name}: {why_not}" if why_not else f"  {command}")
    print(f"\n{size_text(sum(model.size_on_disk for model, *_ in models))} in all")


def row_of(model: CachedRepoInfo, reason: str, files: Mapping[Path, str]) -> dict[str, Any]:
    """Return what there is to say of a model to programs."""
    return {
        "id": model.repo_id,
        "bytes": model.size_on_disk,
        "last_used": model.last_accessed,
        "path": str(model.repo_path),
        "served": not reason,
        "why_not": reason,
        "gguf_files": [
            {"path": str(path), "served": not why_not, "why_not": why_not}
            for path, why_not in files.items()
        ],
    }


def add_remove_options(parser: Parser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="its id, as `list` shows it")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def remove(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Remove models, after a question on a terminal."""
    cached = {model.repo_id: model for model in cached_models()}
    for name in options.models:
        if name not in cached:
            hint = near(name, list(cached)) or "; `slipstream list` shows what is"
            sys.stderr.write(f"slipstream rm: {name} is not downloaded{hint}\n")
            return 1
    size = size_text(sum(cached[name].size_on_disk for name in options.models))
    if not options.yes:
        if not sys.stdin.isatty():
            sys.stderr.write("slipstream rm: no terminal to confirm on; give --yes\n")
            return 2
        try:
            answer = input(f"Remove {', '.join(options.models)} ({size})? [y/N] ")
        except (EOFError, KeyboardInterrupt):
            answer = ""
            print()
        if answer.strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 1
    from huggingface_hub import scan_cache_dir

    revisions = [item for name in options.models for item in cached[name].revisions]
    hashes = [revision.commit_hash for revision in revisions]
    scan_cache_dir().delete_revisions(*hashes).execute()
    print(f"Removed; {size} are free again.")
    return 0


def cached_models() -> list[CachedRepoInfo]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [repository for repository in repositories if repository.repo_type == "model"]
    return sorted(models, key=lambda model: model.repo_id.lower())


def served(model: CachedRepoInfo) -> tuple[str, dict[Path, str]]:
    """Say why a model cannot be served, empty if it can; if it is GGUF files, of each of them."""
    newest = max(model.revisions, key=lambda revision: revision.last_modified, default=None)
    if newest is None:
        return "no files", {}
    folder = Path(newest.snapshot_path)
    if any(folder.glob("*.safetensors")):
        return why_not_served(folder), {}
    files = gguf_files(folder)
    if files:
        return "" if "" in files.values() else "GGUF", files
    return why_not_served(folder) or "no safetensors", {}


def gguf_files(folder: Path) -> dict[Path, str]:
    """Say why each GGUF file cannot be served, empty if it can; of a split one, its first part."""
    from common.gguf.file import model_name, read_model
    from common.gguf.folder import contents_of

    firsts: dict[Path, Path] = {}
    for path in sorted(folder.rglob("*.gguf")):
        firsts.setdefault(path.with_name(model_name(path)), path)
    found = {}
    for path in firsts.values():
        try:
            contents_of(read_model(path))
            found[path] = ""
        except ModelError as error:
            found[path] = str(error).removeprefix(str(path)).lstrip(": ").partition(";")[0]
    return found


def why_not_served(folder: Path) -> str:
    """Say why its config.json cannot be served; empty if it can, as far as that tells."""
    from common.architectures import architecture_of, family_of
    from common.model_folder import read_model_config
    from common.quantization import quant_method, read_quantization

    if not (folder / "config.json").is_file():
        return "no config.json"
    reason = "a broken config.json"
    try:
        raw = read_model_config(folder)
        reason = f"quantized by {quant_method(raw)}"
        read_quantization(raw)
        reason = architecture_of(raw)
        family_of(raw)
    except ModelError:
        return reason
    return ""


def size_text(num_bytes: float) -> str:
    """Write a size in decimal units, as disks are sold, with three digits."""
    for unit in UNITS:
        if num_bytes < 1000 or unit == UNITS[-1]:
            break
        num_bytes /= 1000
    digits = 0 if unit == "B" or num_bytes >= 100 else 1
    return f"{num_bytes:.{digits}f} {unit}"


def age_text(unix_s: float | None) -> str:
    """Say how many days ago that was."""
    days = int((time.time() - (unix_s or 0.0)) / DAY_S)
    if days <= 0:
        return "today"
    if days > 3650:
        return "unknown"
    return "yesterday" if days == 1 else f"{days} days ago"


COMMANDS = {
    "pull": Command(PULL, pull, add_pull_options),
    "list": Command(LIST, list_models, add_list_options),
    "rm": Command(REMOVE, remove, add_remove_options),
}
