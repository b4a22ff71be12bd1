"""Shapes and bounds of the tests of one row."""

from __future__ import annotations

import torch

ON_GPU = torch.cuda.is_available()
EPS = 1e-5

# the interpreter cuts bf16 off where the GPU rounds to nearest, six times on the longest way
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if ON_GPU else 3e-2, torch.float16: 2e-3}

# outputs, inputs: one block and less, tails of both, more blocks than programs
SMALL_SHAPES = ((8, 64), (33, 160), (37, 40), (19, 896))
