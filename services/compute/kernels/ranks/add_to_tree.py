"""Sums as a binary tree (tree_sum.py), for a kernel that gets the summands one by one."""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it here)


@triton.jit
def add_to_tree(part, one, two, four, place):
    """The next summand, of up to eight: the sum of what ends with it, and the sums of one, two and
    four that wait for their neighbours. With the last of 1, 2, 4 or 8 it is the sum of all."""
    if place % 2 == 0:
        one = part
    else:
        part = one + part
        if place % 4 == 1:
            two = part
        else:
            part = two + part
            if place % 8 == 3:
                four = part
            else:
                part = four + part
    return part, one, two, four
