"""How many pages a long sequence has in use on a real server, in models that see a window.

    python -m benchmarks.window [--models mistral-7b-v0.1,gemma-3-4b] [--tokens 32000]

Layers, windows and positions are the models' own; widths and vocabulary are small, so that a CPU
computes the prompt in seconds: a page is as long whatever its width.
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.gpu_server import KV_METRIC, PATH
from benchmarks.stack import Stack, scratch_folder
from services.compute.layers.paged_cache import CacheLayout
from services.compute.models.families import read_config

NARROW = {
    "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
    "vocab_size": 4096, "max_model_len": 32768,
}  # fmt: skip
DECODED = 300  # tokens after the prompt, while which the pages are counted
CACHE_TOKENS = 65536
PAGE_TOKENS = 16
POLL_S = 0.2


class Usage:
    """The largest share of the KV cache that a server has told."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.peak = 0.0

    def look(self) -> None:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = [float(line.split()[-1]) for line in lines if line.startswith(KV_METRIC)]
        self.peak = max(self.peak, *found)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look again and again."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(POLL_S):
                self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        yield
        done.set()
        thread.join()


def pages_in_use(name: str, num_tokens: int) -> None:
    """Serve a model, compute a prompt, decode, and print the most pages that were in use."""
    options = ["--device", "cpu", "--load-format", "dummy", "--dtype", "float32"]
    options += ["--max-num-seqs", "4", "--max-prefill-tokens", "2048"]
    options += ["--max-batched-token-mem", str(CACHE_TOKENS)]
    with scratch_folder() as scratch:
        folder = make_folder(scratch / name, replace(SHAPES[name], **NARROW))
        config = read_config(json.loads((folder / "config.json").read_text()))
        spans = CacheLayout.of(config.spans).spans
        ids = [(7 * number) % 3000 + 3 for number in range(num_tokens)]
        body = {"model": name, "prompt": ids, "max_tokens": DECODED, "ignore_eos": True}
        with Stack(folder, *options) as stack:
            usage = Usage(stack.url)
            request = urllib.request.Request(
                stack.url + PATH, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with usage.watched(), urllib.request.urlopen(request, timeout=600) as answer:
                counted = json.load(answer)["usage"]
    num_tokens = counted["prompt_tokens"] + counted["completion_tokens"]
    of_group = -(-num_tokens // PAGE_TOKENS)
    in_use = usage.peak * len(spans) * CACHE_TOKENS / PAGE_TOKENS
    num_windows = sum(not span.is_full for span in spans)
    print(
        f"{name}: {num_tokens} tokens; {len(spans)} cache groups, {num_windows} of "
        f"them windows; {in_use:.0f} pages in use, {len(spans) * of_group} without windows"
    )


def main() -> None:
    """Every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="mistral-7b-v0.1,gemma-3-4b")
    parser.add_argument("--tokens", type=int, default=32000)
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        pages_in_use(name, arguments.tokens)


if __name__ == "__main__":
    main()
