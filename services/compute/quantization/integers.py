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
    none_if_zero,
    skip_not_needed,
)
from services.compute.quantization.packed import BLOCK, Kind, Packed, halves

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ has the eight outputs, in steps of 4 bits."""


def unpacked(words: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Codes [N, W * 32 / bits] (uint8) of words [N, W] (int32), by default from the lowest bits."""
    places = order or tuple(range(32 // bits))
    shifts = torch.tensor(places, dtype=torch.int32, device=words.device) * bits
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(1)


@dataclass(frozen=True, slots=True)
class Integers:
    """Codes [O, I] and zeros [O, G] of a checkpoint, without sign, and scales [O, G]."""

    bits: int
    codes_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None  # None: the middle of the range
    groups_I: Tensor | None = None  # the group of each input, where they do not follow one another

    def packed(self) -> Packed:
        order_I = None if self.groups_I is None else self._order()
        codes_OI = self.codes_OI if order_I is None else self.codes_OI[:, order_I]
        middle = 1 << (self.bits - 1)
        zeros_OG = None
        if self.zeros_OG is not None:
            zeros_OG = none_if_zero(self.zeros_OG.to(self.scales_OG.dtype) - middle)
        if self.bits == 8:
            signed = (codes_OI ^ middle).view(torch.int8)
            return Packed("int8", signed.contiguous(), self.scales_OG, zeros_OG, order_I)
        return Packed("int4", halves(codes_OI), self.scales_OG, zeros_OG, order_I)

    def _order(self) -> Tensor | None:
        """The inputs by their groups; None if they are so already."""
        assert self.groups_I is not None
        order_I = torch.argsort(self.groups_I, stable=True)
        follows = torch.arange(len(order_I), device=order_I.device)
        return None if torch.equal(order_I, follows) else order_I


def check_bits(bits: int, where: str, num_in: int) -> None:
    if bits not in (4, 8):
        raise ModelError(
            f"{where}: weights of {bits} bits are not supported; of integers, 4 and 8 bits are. "
            "Quantize the model to one of these."
        )
    if bits == 4 and num_in % BLOCK:
        raise ModelError(f"{where}: {num_in} inputs in 4 bits: only multiples of {BLOCK} are.")


@dataclass(frozen=True, slots=True)
class Gptq:
    """`qweight` [I / 8, O], words of inputs. Version 1 of the format has zeros that are 1 less."""

    bits: int
    zeros_less_one: bool = True

    @property
    def kind(self) -> Kind:
        return "int8" if self.bits == 8 else "int4"

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        if not tensors.has(f"{name}.qweight"):
            return None
        (num_out, num_in), per_word = shape, 32 // self.bits
        check_bits(self.bits, tensors.where, num_in)
        words = tensors.read(f"{name}.qweight")
        check_shape(tensors, f"{name}.qweight", words, (num_in // per_word, num_out), shape)
        scales_OG = tensors.read(f"{name}.scales").t().contiguous()
        zeros = unpacked(tensors.read(f"{name}.qzeros"), self.bits)
        if zeros.shape != scales_OG.t().shape or len(scales_OG) != num_out:
            raise misshapen(tensors, f"{name}.qzeros", tuple(zeros.shape), shape)
        zeros_OG = zeros.t().float().add(1.0 if self.zeros_less_one else 0.0)
        groups_I = None
        if tensors.has(f"{name}.g_idx"):
            groups_I = tensors.read(f"{name}.g_idx")
        self._check_bias(tensors, name)
        codes_OI = unpacked(words.t().contiguous(), self.bits)
        return Integers(self.bits, codes_OI, scales_OG, zeros_OG, groups_I).packed()

    @staticmethod
    def _check_bias(tensors: TensorReader, name: str) -> None:
        """Some writers add biases of zeros to maps that have none."""
        bias = f"{name}.bias"
        if tensors.has(bias) and not torch.any(tensors.read(bias)):
            tensors.skip(bias)


@dataclass(frozen=True, slots=True)
class Awq:
    """`qweight` [I, O / 8], words of outputs in AWQ's order (its version "gemm")."""

    bits: int = 4

    @property
    def kind(self) -> Kind:
        return "int4"

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        if not tensors.has(f"{name}.qweight"):
            return None
        num_out, num_in = shape
        check_bits(self.bits, tensors.where, num_in)
        words = tensors.read(f"{name}.qweight")
        check_shape(tensors, f"{name}.qweight", words, (num_in, num_out // 8), shape)
        scales_OG = tensors.read(f"{name}.scales").t().contiguous()
        zeros = unpacked(tensors.read(f"{name}.qzeros"), 4, AWQ_ORDER)
        if zeros.shape != scales_OG.t().shape or len(scales_OG) != num_out:
            raise misshapen(tensors, f"{name}.qzeros", tuple(zeros.shape), shape)
        codes_OI = unpacked(words, 4, AWQ_ORDER).t().contiguous()
        return Integers(4, codes_OI, scales_OG, zeros.t()).packed()


def read_packed_integers(
    tensors: TensorReader, name: str, words: Tensor, shape: tuple[int, int]
) -> Packed:
    """compressed-tensors' "pack-quantized": `weight_packed` [O, W], words of inputs."""
    num_out, num_in = shape
    bits = 32 * words.shape[1] // max(1, num_in)
    check_bits(bits, tensors.where, num_in)
    check_shape(tensors, f"{name}.weight_packed", words, (num_out, num_in * bits // 32), shape)
    scales = tensors.read(f"{name}.weight_scale")
    scales_OG = groups_of(tensors, f"{name}.weight_scale", scales, shape)
    zeros_OG = groups_I = None
    if tensors.has(f"{name}.weight_zero_point"):  # its words are of outputs
        zeros = unpacked(tensors.read(f"{name}.weight_zero_point").t().contiguous(), bits)
        zeros_OG = groups_of(tensors, f"{name}.weight_zero_point", zeros.t()[:num_out], shape)
    if tensors.has(f"{name}.weight_g_idx"):
        groups_I = tensors.read(f"{name}.weight_g_idx")
        groups_I = None if torch.any(groups_I < 0) else groups_I
    skip_not_needed(tensors, name)
    return Integers(bits, unpacked(words, bits), scales_OG, zeros_OG, groups_I).packed()


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
