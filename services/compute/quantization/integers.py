"""INT4 and INT8 weights: of GPTQ (and AutoRound), of AWQ and of compressed-tensors.

Their files put the codes of several outputs or inputs into words of 32 bits, each in an order of
its own. A code is without sign there, and w = (code - zero) * scale.

Shape legend: O outputs, I inputs, G groups of inputs in a row, W words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ModelError
from services.compute.quantization.format import (
    TensorReader,
    check_shape,
    groups_of,
    misshapen,
    nibbles,
    skip_not_needed,
)
from services.compute.quantization.packed import BLOCK, Packed, halves

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ has the eight outputs, in steps of 4 bits."""


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes [N, W * 32 / bits] (uint8) of words [N, W] (int32), from the lowest bits on."""
    pairs = words.contiguous().view(torch.uint8)
    return nibbles(pairs) if bits == 4 else pairs


def awq_unpacked(words: Tensor) -> Tensor:
    codes = nibbles(words.view(torch.uint8))
    return codes.view(len(words), -1, 8)[:, :, AWQ_ORDER].flatten(1)


@dataclass(frozen=True, slots=True)
class Integers:
    """Codes [O, I] and zeros [O, G] of a checkpoint, without sign, and scales [O, G]."""

    bits: int
    codes_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None  # None: the middle of the range
    order_I: Tensor | None = None  # the inputs by their groups, where they are not so

    def packed(self) -> Packed:
        middle, zeros_OG = 1 << (self.bits - 1), None
        if self.zeros_OG is not None:
            zeros_OG = none_if_zero(self.zeros_OG.to(self.scales_OG.dtype) - middle)
        codes_OI = self.codes_OI if self.order_I is None else self.codes_OI[:, self.order_I]
        if self.bits == 8:
            signed = (codes_OI ^ middle).view(torch.int8)
            return Packed("int8", signed.contiguous(), self.scales_OG, zeros_OG, self.order_I)
        return Packed("int4", halves(codes_OI), self.scales_OG, zeros_OG, self.order_I)


def none_if_zero(zeros_OG: Tensor) -> Tensor | None:
    return zeros_OG.contiguous() if torch.any(zeros_OG) else None


def order_of(tensors: TensorReader, name: str, num_groups: int) -> Tensor | None:
    """The inputs by their groups, which a tensor of this name tells; None if they are so already,
    or there is none."""
    if not tensors.has(name):
        return None
    groups_I = tensors.read(name)
    if torch.any(groups_I < 0):  # not set
        return None
    order_I = torch.argsort(groups_I, stable=True)
    follows = torch.arange(len(order_I), device=order_I.device)
    if not torch.equal(groups_I[order_I], follows // (len(order_I) // num_groups)):
        raise ModelError(f"{tensors.where}: tensor {name} makes groups that differ in size.")
    return None if torch.equal(order_I, follows) else order_I


def check_bits(tensors: TensorReader, name: str, bits: int, num_in: int) -> None:
    if bits not in (4, 8):
        raise ModelError(
            f"{tensors.where}: tensor {name} is of {bits} bits for each of {num_in} inputs; of "
            "integers, 4 and 8 bits are supported."
        )
    if bits == 4 and num_in % BLOCK:
        raise ModelError(
            f"{tensors.where}: tensor {name} has {num_in} inputs in 4 bits; only multiples of "
            f"{BLOCK} are supported."
        )


@dataclass(frozen=True, slots=True)
class Gptq:
    """`qweight` [W, O], words of inputs. Version 1 of the format has zeros that are 1 less."""

    zeros_less_one: bool = True

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        if not tensors.has(f"{name}.qweight"):
            return None
        num_out, num_in = shape
        words = tensors.read(f"{name}.qweight")
        bits = 32 * len(words) // num_in
        check_bits(tensors, f"{name}.qweight", bits, num_in)
        check_shape(tensors, f"{name}.qweight", words, (num_in * bits // 32, num_out), shape)
        zero_words = tensors.read(f"{name}.qzeros")
        if self.zeros_less_one:  # all of a word in one addition: a zero of 0 was borrowed for
            zero_words = zero_words + sum(1 << place for place in range(0, 32, bits))
        zeros = unpacked(zero_words, bits)
        scales_OG = _scales_like(tensors, name, zeros, shape)
        order_I = order_of(tensors, f"{name}.g_idx", scales_OG.shape[1])
        return Integers(bits, unpacked(words.t(), bits), scales_OG, zeros.t(), order_I).packed()


class Awq:
    """`qweight` [I, W], words of outputs in AWQ's order (its version "gemm")."""

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        if not tensors.has(f"{name}.qweight"):
            return None
        num_out, num_in = shape
        words = tensors.read(f"{name}.qweight")
        check_bits(tensors, f"{name}.qweight", 4, num_in)
        check_shape(tensors, f"{name}.qweight", words, (num_in, num_out // 8), shape)
        zeros = awq_unpacked(tensors.read(f"{name}.qzeros"))
        scales_OG = _scales_like(tensors, name, zeros, shape)
        return Integers(4, awq_unpacked(words).t(), scales_OG, zeros.t()).packed()


def _scales_like(
    tensors: TensorReader, name: str, zeros_GO: Tensor, shape: tuple[int, int]
) -> Tensor:
    """Scales [O, G] of a module, of the same groups as its zeros."""
    scales_GO = tensors.read(f"{name}.scales")
    if zeros_GO.shape != scales_GO.shape:
        raise misshapen(tensors, f"{name}.qzeros", zeros_GO, shape)
    return groups_of(tensors, f"{name}.scales", scales_GO.t(), shape)


def read_packed_integers(
    tensors: TensorReader, name: str, words: Tensor, shape: tuple[int, int]
) -> Packed:
    """compressed-tensors' "pack-quantized": `weight_packed` [O, W], words of inputs."""
    num_out, num_in = shape
    bits = 32 * words.shape[1] // num_in
    check_bits(tensors, f"{name}.weight_packed", bits, num_in)
    check_shape(tensors, f"{name}.weight_packed", words, (num_out, num_in * bits // 32), shape)
    scales = tensors.read(f"{name}.weight_scale")
    scales_OG = groups_of(tensors, f"{name}.weight_scale", scales, shape)
    zeros_OG = None
    if tensors.has(f"{name}.weight_zero_point"):  # its words are of outputs
        zeros = unpacked(tensors.read(f"{name}.weight_zero_point").t(), bits).t()[:num_out]
        zeros_OG = groups_of(tensors, f"{name}.weight_zero_point", zeros, shape)
    order_I = order_of(tensors, f"{name}.weight_g_idx", scales_OG.shape[1])
    skip_not_needed(tensors, name)
    return Integers(bits, unpacked(words, bits), scales_OG, zeros_OG, order_I).packed()


def read_int8(tensors: TensorReader, name: str, codes: Tensor, shape: tuple[int, int]) -> Packed:
    """compressed-tensors' "int-quantized": codes with sign, one in a byte."""
    check_shape(tensors, f"{name}.weight", codes, shape, shape)
    scales = tensors.read(f"{name}.weight_scale")
    scales_OG = groups_of(tensors, f"{name}.weight_scale", scales, shape)
    zeros_OG = None
    if tensors.has(f"{name}.weight_zero_point"):
        zeros = tensors.read(f"{name}.weight_zero_point").to(scales_OG.dtype)
        zeros_OG = none_if_zero(groups_of(tensors, f"{name}.weight_zero_point", zeros, shape))
    skip_not_needed(tensors, name)
    return Packed("int8", codes, scales_OG, zeros_OG)
