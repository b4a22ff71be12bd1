"""Many copies in one call of the driver: cuMemcpyBatchAsync, of CUDA 12.8 and later.

Neither torch nor Triton offers it, so that it is called through ctypes. The copy engines do the
work: no multiprocessor is taken from the kernels that run beside.

Shape legend: C copies.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.compute.kv.transfer import PagePairs

Addresses: TypeAlias = npt.NDArray[np.uint64]

SIGNATURE_OF = 12080  # the version whose signature is called; later drivers still have it
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
PREFER_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p),
)
"""Of (dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream)."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The locations are hints for managed memory only."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """The driver's function; `find` returns None where the driver does not have it."""

    def __init__(self, function: Any, flags: int = PREFER_OVERLAP) -> None:
        self._function = function
        self._attributes = _Attributes(source_order=IN_STREAM_ORDER, flags=flags)
        self._first = ctypes.c_size_t(0)  # the first copy that the attributes are for
        self._failed = ctypes.c_size_t(0)

    @staticmethod
    def find(library: str = "libcuda.so.1") -> BatchCopy | None:
        try:
            driver = ctypes.CDLL(library)
            look_up = driver.cuGetProcAddress_v2
        except (OSError, AttributeError):
            return None
        found, status = ctypes.c_void_p(), ctypes.c_int()
        arguments = (ctypes.c_int(SIGNATURE_OF), ctypes.c_uint64(0), ctypes.byref(status))
        error = look_up(b"cuMemcpyBatchAsync", ctypes.byref(found), *arguments)
        if error or not found.value:
            return None
        return BatchCopy(SIGNATURE(found.value))

    def copy_pages(self, source: Tensor, target: Tensor, pages: PagePairs, stream: int) -> int:
        """Copy pages between memories of the same shape, as `copy` does."""
        page_bytes = np.uint64(source[0].nbytes)
        sources, targets, sizes = (c.astype(np.uint64) * page_bytes for c in pages.runs())
        sources += np.uint64(source.data_ptr())
        targets += np.uint64(target.data_ptr())
        return self.copy(sources, targets, sizes, stream)

    def copy(self, sources: Addresses, targets: Addresses, sizes: Addresses, stream: int) -> int:
        """Start all copies [C] on a stream; return the driver's error, 0 for none.

        They may be done in any order. After an error, some may have been started.
        """
        return int(
            self._function(
                targets.ctypes.data,
                sources.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                ctypes.addressof(self._attributes),
                ctypes.addressof(self._first),
                1,
                ctypes.addressof(self._failed),
                stream,
            )
        )
