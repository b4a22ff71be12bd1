"""Every entry of a quantized KV cache becomes the number that it is, in the kernels, too."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from services.compute.kernels.kv.kv_entries import Codes, decode, decode_words
from services.compute.kernels.kv.kv_format import LARGEST
from tests.kernels.quantized_pages import ENTRIES, layer_of


@triton.jit
def _decode_kernel(codes, out, ENTRY: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, decode(tl.load(codes + i), ENTRY, WIDE, ASM))


@triton.jit
def _decode_words_kernel(codes, out, ENTRY: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr):
    i = tl.arange(0, 128)
    low, high = decode_words(tl.load(codes + i), ENTRY, WIDE, ASM)
    tl.store(out + 2 * i, low)
    tl.store(out + 2 * i + 1, high)


@pytest.mark.parametrize("kernel", [_decode_kernel, _decode_words_kernel])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_is_decoded_exactly(
    entry: torch.dtype, dtype: torch.dtype, kernel: triton.JITFunction, device: torch.device
) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    codes = Codes.of(layer_of(torch.zeros(1, 2, 1, 16, 16, device=device), entry))
    code_dtype = (codes if kernel is _decode_kernel else codes.words).pages.dtype
    for asm in {False, codes.has_instructions}:
        out = torch.empty(256, dtype=dtype, device=device)
        kernel[(1,)](
            every.view(code_dtype).to(device),
            out,
            ENTRY=codes.entry,
            WIDE=dtype == torch.float32,
            ASM=asm,
        )
        exact = every.view(entry).double()
        used = exact.abs() <= LARGEST[entry]
        assert torch.equal(out.cpu().double()[used], exact[used])


def test_scales_of_a_key_and_its_value_are_one_word(device: torch.device) -> None:
    layer = layer_of(torch.ones(2, 2, 3, 16, 32, device=device), torch.int8)
    assert layer.scales is not None
    layer.scales[1, 0, 2, 5], layer.scales[1, 1, 2, 5] = 2.0, 0.5
    codes = Codes.of(layer)
    assert codes.scales is not None and codes.scales.shape == (2, 3, 16)
    assert int(codes.scales[1, 2, 5]) == 0x3F004000
    assert (codes.page_stride, codes.scale_stride) == (
        layer.entries.stride(0),
        codes.scales.stride(0),
    )
