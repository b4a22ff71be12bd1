"""With which constants are products fastest on this GPU? Fills the table that is shipped for it.

    python -m benchmarks.gpu_choices [--models llama-8b,llama-1b,llama-70b] [--again]
                                     [--formats auto,fp8,int4] [--out FILE]

As at a server's first start, without its limit of time: each model has dummy weights and as few
layers as have a product read its weights from memory. `auto` is bfloat16, int4 is as AWQ's. What
the table has already is measured only `--again`. Written after each model and format.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu_models import SHAPES, Shape, make_folder
from benchmarks.stack import scratch_folder
from services.compute.config import ComputeSettings
from services.compute.kernels.choice_files import SHIPPED, Found, file_in, read, write
from services.compute.layers.weighted_layers import KernelLinears
from services.compute.runner.cuda.choosing import Measuring
from services.compute.runner.cuda.load import machine_sizes
from services.compute.runner.cuda.meter import GraphMeter
from services.compute.runner.cuda.step_machine import StepMachine
from services.compute.runner.cuda.stream import GraphStream
from services.compute.runner.model_loader import ModelLoader

NEEDS_GPU = True
BY_NAME_ONLY = True  # it changes what is shipped

COLD_BYTES = 100 << 20
"""Twice what the L2 cache holds."""


def num_layers(shape: Shape) -> int:
    """As many as make the weights of the smallest map, in 4 bits, larger than the cache."""
    smallest = shape.hidden_size * shape.num_heads * shape.head_dim // 2
    return min(shape.num_layers, -(-COLD_BYTES // smallest))


def measured(folder: Path, quantization: str, known: Found, device: torch.device) -> Found:
    """What is fastest for what this model asks for, and is not known."""
    settings = ComputeSettings.model_validate(
        {
            "device": "cuda",
            "dtype": "bfloat16",
            "load_format": "dummy",
            "quantization": quantization,
            "max_model_len": 4096,
        }
    )
    loader = ModelLoader.read(folder, settings, device)
    stream = GraphStream(device)
    decoder = loader.decoder(KernelLinears(loader.dtype, keeps_dense=False))
    machine = StepMachine(decoder, machine_sizes(loader), stream, batch_invariant=False)
    machine.choices.add(known)
    asked = machine.asked(loader.cache(num_pages=1))
    meter = GraphMeter(stream, device)
    found = dict(Measuring(meter, budget_s=float("inf")).choices(asked))
    stream.forget()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="llama-8b,llama-1b,llama-70b")
    parser.add_argument("--formats", default="auto,fp8,int4")
    parser.add_argument("--again", action="store_true", help="measure what the table has, too")
    parser.add_argument("--out", type=Path, help="default: the table in the package")
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    path = arguments.out or file_in(SHIPPED, name)
    table = read(path, name)
    fresh: Found = {}
    with scratch_folder() as scratch, torch.inference_mode():
        for model in arguments.models.split(","):
            shape = replace(SHAPES[model], num_layers=num_layers(SHAPES[model]))
            folder = make_folder(scratch / model, shape)
            for quantization in arguments.formats.split(","):
                began_s = time.monotonic()
                known = fresh if arguments.again else table
                found = measured(folder, quantization, known, device)
                fresh |= found
                table |= found
                write(path, name, table)
                seconds = time.monotonic() - began_s
                print(f"{model} {quantization}: {len(found)} products in {seconds:.0f} s")
                for key, choice in found.items():
                    gain = 1 - choice.us / choice.default_us
                    print(f"  {choice.us:8.2f} us {gain:5.0%}  {key} {choice.config}", flush=True)


if __name__ == "__main__":
    main()
