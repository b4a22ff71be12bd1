"""How much memory loading takes beyond what stays: by format, and for weights quantized at load.

    python -m benchmarks.loading

Each case loads a Llama-shaped model of 313 million random weights in a process of its own, as
`slipstream serve` on a CPU does and as packed weights on a GPU stay, and watches the process.
Pages of files that are read do not count: the system takes them back when it wants them. The
largest matrix is that of gate and up, in the dtype.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.report import Report
from services.compute.config import ComputeSettings
from services.compute.layers.cpu_linear import CpuLinears
from services.compute.layers.weighted_layers import KernelLinears
from services.compute.runner.model_loader import ModelLoader, keep_freed_memory

HIDDEN, INNER, LAYERS, VOCABULARY = 2048, 5632, 6, 8192
GROUP = 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MAPS = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
MIB = 1 << 20


def words(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape).mul_(0.01).add_(0.001)


def plain(num_out: int, num_in: int) -> dict[str, Tensor]:
    return {"weight": torch.randn(num_out, num_in).mul_(0.02).bfloat16()}


def fp8(num_out: int, num_in: int) -> dict[str, Tensor]:
    codes = torch.randn(num_out, num_in).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales(num_out // 128, num_in // 128)}


def int8(num_out: int, num_in: int) -> dict[str, Tensor]:
    codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
    return {"weight": codes, "weight_scale": scales(num_out, 1)}


def nvfp4(num_out: int, num_in: int) -> dict[str, Tensor]:
    pairs = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)
    groups = scales(num_out, num_in // 16).to(torch.float8_e4m3fn)
    return {"weight": pairs, "weight_scale": groups, "weight_scale_2": torch.tensor(0.1)}


def gptq(num_out: int, num_in: int) -> dict[str, Tensor]:
    order = torch.randperm(num_in, generator=torch.Generator().manual_seed(1))
    return {
        "qweight": words(num_in // 8, num_out),
        "qzeros": words(num_in // GROUP, num_out // 8),
        "scales": scales(num_in // GROUP, num_out).half(),
        "g_idx": (torch.arange(num_in) // GROUP)[order].int(),
    }


def awq(num_out: int, num_in: int) -> dict[str, Tensor]:
    return {
        "qweight": words(num_in, num_out // 8),
        "qzeros": words(num_in // GROUP, num_out // 8),
        "scales": scales(num_in // GROUP, num_out).half(),
    }


GROUPS = {"0": {"weights": {"type": "int", "num_bits": 8}}}
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (plain, {}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int8": (int8, {"quant_method": "compressed-tensors", "config_groups": GROUPS}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "awq": (awq, {"quant_method": "awq", "bits": 4}),
}
CASES = [(name, "auto") for name in FORMATS] + [("plain", kind) for kind in ("fp8", "int8", "int4")]
WAYS = ("packed", "cpu, bfloat16", "cpu, float32")


def make_folder(folder: Path, name: str) -> Path:
    """Write a model in one of the formats, a file for each layer."""
    torch.manual_seed(0)
    make, config = FORMATS[name]
    folder.mkdir()
    for layer in range(LAYERS):
        at, tensors = f"model.layers.{layer}", {}
        for module, shape in MAPS.items():
            parts = make(*shape)
            tensors |= {f"{at}.{module}.{ending}": part for ending, part in parts.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
        save_file(tensors, folder / f"layer-{layer}.safetensors")
    top = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN).bfloat16()}
    save_file(
        top | {"model.norm.weight": torch.ones(HIDDEN).bfloat16()}, folder / "top.safetensors"
    )
    raw = CONFIG | ({"quantization_config": config} if config else {})
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def resident() -> int:
    """Bytes of this process that are its own, not a file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def load(folder: Path, quantization: str, way: str) -> None:
    """Print what stays, what was the most, and the seconds that it took."""
    dtype = "float32" if way.endswith("float32") else "bfloat16"
    settings = ComputeSettings(device="cpu", dtype=dtype, quantization=quantization)
    loader = ModelLoader.read(folder, settings, torch.device("cpu"))
    torch.set_num_threads(1)
    keep_freed_memory(False)
    is_packed = way == "packed"
    make = KernelLinears(loader.dtype, False) if is_packed else CpuLinears(loader.dtype, False)
    before = most = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    decoder = loader.decoder(make)
    took_s = time.monotonic() - started
    done.set()
    watcher.join()
    final = resident()
    num_out, num_in = MAPS["mlp.up_proj"]
    largest = 2 * num_out * num_in * loader.dtype.itemsize  # with gate
    print(json.dumps([final - before, max(most, final) - before, largest, took_s]))
    del decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        load(Path(given.load[0]), *given.load[1:])
        return
    report = Report("loading", "Memory of loading", __doc__.split("\n\n")[2].replace("\n", " "))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, kind in CASES:
            folder = Path(scratch) / name
            if not folder.exists():
                make_folder(folder, name)
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.loading", "--load"]
                ran = subprocess.run([*command, str(folder), kind, way], check=True,
                                     capture_output=True, text=True)  # fmt: skip
                final, most, largest, took_s = json.loads(ran.stdout.splitlines()[-1])
                title = name if kind == "auto" else f"plain, --quantization {kind}"
                rows.append((f"{title}: {way}", *[round(size / MIB) for size in
                             (final, most, most - final, largest)], round(took_s, 1)))  # fmt: skip
                print(rows[-1], flush=True)
    report.table(["format", "stays, MiB", "most", "beyond", "largest matrix", "seconds"], rows)
    report.write()


if __name__ == "__main__":
    main()
