"""Where a model takes its tensors from: a checkpoint, or random numbers in its place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from common.quantization import QuantizationConfig
from services.compute.quantization.at_load import Quantization, fp8_of_blocks, quantized
from services.compute.quantization.packed import UNCUT, Cut, Packed, Weight, stacked


class WeightSource(Protocol):
    """Hands out the tensors of one checkpoint, by name, cast and on the device."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what is not quantized."""
        ...

    @property
    def device(self) -> torch.device: ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of this name, in another dtype if one is given; raises ModelError if it is
        missing or of another shape."""
        ...

    def stack(self, names: Sequence[str], rows: Sequence[int]) -> Tensor: ...

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, cut: Cut = UNCUT
    ) -> Weight:
        """The weights [rows, columns] of several modules on top of one another, and what the cut
        takes of them, whose rows are in the order of modules."""
        ...

    def leave(self, names: Sequence[str], rows: Sequence[int], columns: int) -> None:
        """Pass over what `linear` would return, which another rank takes, without reading it."""
        ...

    def numbers(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None
    ) -> Tensor:
        """The weight of a module that is not multiplied by in codes, quantized or not; in another
        dtype if one is given."""
        ...

    def head(self, name: str, shape: tuple[int, int], cut: Cut = UNCUT) -> Weight:
        """The weight of the module that makes logits."""
        ...

    def tied_head(self, name: str, shape: tuple[int, int], cut: Cut, rows_VE: Tensor) -> Weight:
        """The same where it is the embedding of this name, of which the cut takes these rows."""
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a module of this name."""
        ...

    def skip(self, *prefixes: str) -> None:
        """Accept tensors that are not needed, whose names begin so, if they are there."""
        ...

    def finish(self) -> None:
        """Raise ModelError if the checkpoint holds tensors that were not taken."""
        ...


SCALE = 0.02
"""Standard deviation, as models of this kind are initialised."""


class DummyWeights:
    """Seeded random tensors of whatever shape is asked for; norms' weights are near one.

    The values depend on the kind of device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of this shape; the order of calls decides its values."""
        # drawn where they are used: 8 billion of them take a minute on a CPU
        values = torch.randn(shape, generator=self._generator, device=self.device).mul_(SCALE)
        if name.endswith("norm.weight"):
            values.add_(1.0)
        return values.to(self.dtype).to(dtype or self.dtype)

    def stack(self, names: Sequence[str], rows: Sequence[int]) -> Tensor:
        return self.take(names[0], (sum(rows),))

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, cut: Cut = UNCUT
    ) -> Tensor:
        return cut.of_numbers(self.take(names[0], (sum(rows), columns))).contiguous()

    def leave(self, names: Sequence[str], rows: Sequence[int], columns: int) -> None:
        self.take(names[0], (sum(rows), columns))  # those behind it are drawn as in one process

    def numbers(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None
    ) -> Tensor:
        return self.take(name, shape, dtype)

    def head(self, name: str, shape: tuple[int, int], cut: Cut = UNCUT) -> Tensor:
        return cut.of_numbers(self.take(name, shape))

    def tied_head(self, name: str, shape: tuple[int, int], cut: Cut, rows_VE: Tensor) -> Tensor:
        return rows_VE

    def has(self, name: str) -> bool:
        return True

    def skip(self, *prefixes: str) -> None:
        pass

    def finish(self) -> None:
        pass


class QuantizedAtLoad:
    """A source whose linear maps are quantized, one after the other.

    The head gets 8 bits, whatever the others get, and none where the weights stand for those of a
    checkpoint: it takes as much of a step as two layers, and its error goes into every logit.
    """

    def __init__(
        self,
        source: WeightSource,
        quantization: Quantization,
        stands_for: QuantizationConfig | None = None,
    ) -> None:
        """`stands_for`: what a checkpoint says in whose place random weights are."""
        self._source = source
        self._quantization = quantization
        self._stands_for = stands_for

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return self._source.device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._source.take(name, shape, dtype)

    def stack(self, names: Sequence[str], rows: Sequence[int]) -> Tensor:
        return self._source.stack(names, rows)

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, cut: Cut = UNCUT
    ) -> Weight:
        # What is cut before has the numbers of the whole, too: not inputs, of which a scale has
        # many, nor rows of blocks.
        said = self._stands_for
        before = UNCUT if said is not None and said.block is not None else Cut(cut.rows)
        behind = cut if before is UNCUT else Cut(inputs=cut.inputs)
        weight = self._source.linear(names, rows, columns, before)
        return behind.of(self._quantized(weight, names), self.dtype)

    def leave(self, names: Sequence[str], rows: Sequence[int], columns: int) -> None:
        self._source.leave(names, rows, columns)

    def _quantized(self, weight: Weight, names: Sequence[str]) -> Weight:
        said = self._stands_for
        stays = said is not None and said.of_experts and ".experts." not in names[0]
        if isinstance(weight, Packed) or stays:
            return weight
        if said is not None and said.block is not None:
            made: Weight = fp8_of_blocks(weight, said.block)
        else:
            made = quantized(weight, self._quantization)
        if said is None or not isinstance(made, Packed):
            return made
        return replace(made, inputs_8bit=said.kind in said.inputs_8bit)

    def numbers(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._source.numbers(name, shape, dtype)

    def head(self, name: str, shape: tuple[int, int], cut: Cut = UNCUT) -> Weight:
        return self._in_8_bits(self._source.head(name, shape, cut))

    def tied_head(self, name: str, shape: tuple[int, int], cut: Cut, rows_VE: Tensor) -> Weight:
        return self._in_8_bits(self._source.tied_head(name, shape, cut, rows_VE))

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def skip(self, *prefixes: str) -> None:
        self._source.skip(*prefixes)

    def finish(self) -> None:
        self._source.finish()

    def _in_8_bits(self, weight: Weight) -> Weight:
        if self._stands_for is not None or isinstance(weight, Packed):
            return weight
        return quantized(weight, "int8")


def names_from(prefix: str, names: Sequence[str]) -> Iterator[str]:
    """Those of sorted names that begin so. By bisection: formats skip something of each module, of
    which mixtures have 50,000."""
    for at in range(bisect_left(names, prefix), len(names)):
        if not names[at].startswith(prefix):
            return
        yield names[at]


class Checkpoint(Protocol):
    """The files of a checkpoint."""

    def has_module(self, name: str) -> bool: ...

    def packed(self, name: str, shape: tuple[int, int]) -> Packed | None:
        """The weight of the module of this name on the device; None where it is not quantized.

        Raises ModelError for one that is missing, damaged or of another shape.
        """
        ...

    def copy(self, name: str, shape: tuple[int, ...], target: Tensor, cut: Cut = UNCUT) -> None:
        """Cast what the cut takes of a tensor that is not quantized into memory; ModelError if the
        tensor is of another shape."""
        ...

    def skip(self, *prefixes: str) -> None: ...

    def finish(self) -> None: ...


class CheckpointWeights:
    """The tensors of a checkpoint, copied one at a time into memory of their own.

    Copied even where no cast is needed: mapped tensors are aligned to 8 bytes only, and their
    pages would be faulted in while requests wait.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._checkpoint = checkpoint
        self.device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._stack([name], shape[:1], shape[1:], dtype)

    def stack(self, names: Sequence[str], rows: Sequence[int]) -> Tensor:
        return self._stack(names, rows)

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, cut: Cut = UNCUT
    ) -> Weight:
        parts = [
            self._checkpoint.packed(name, (count, columns))
            for name, count in zip(names, rows, strict=True)
        ]
        weights = [f"{name}.weight" for name in names]
        if not any(parts):  # nothing is quantized: no copy of a copy
            return self._stack(weights, rows, (columns,), cut=cut)
        plain = [
            self.take(name, (count, columns)) if part is None else part
            for name, count, part in zip(weights, rows, parts, strict=True)
        ]
        return cut.of(stacked(plain, self.dtype), self.dtype)

    def leave(self, names: Sequence[str], rows: Sequence[int], columns: int) -> None:
        self._checkpoint.skip(*[f"{name}." for name in names])

    def numbers(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None
    ) -> Tensor:
        packed = self._checkpoint.packed(name, shape)
        if packed is None:
            return self.take(f"{name}.weight", shape, dtype)
        return packed.dense(dtype or self.dtype)

    def head(self, name: str, shape: tuple[int, int], cut: Cut = UNCUT) -> Weight:
        return self.linear([name], shape[:1], shape[1], cut)

    def tied_head(self, name: str, shape: tuple[int, int], cut: Cut, rows_VE: Tensor) -> Weight:
        packed = self._checkpoint.packed(name, shape)
        return rows_VE if packed is None else cut.of(packed, self.dtype)

    def has(self, name: str) -> bool:
        return self._checkpoint.has_module(name)

    def skip(self, *prefixes: str) -> None:
        self._checkpoint.skip(*prefixes)

    def finish(self) -> None:
        self._checkpoint.finish()

    def _stack(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        rest: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
        cut: Cut = UNCUT,
    ) -> Tensor:
        """Tensors [rows, *rest] on top of one another."""
        cuts = list(_by_module(cut, rows))
        num_rows = [count if each.rows is None else len(each.rows) for count, each in cuts]
        columns = rest if cut.inputs is None else (len(cut.inputs),)
        shape = sum(num_rows), *columns
        target = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        targets = torch.split(target, num_rows)
        for name, (count, each), part in zip(names, cuts, targets, strict=True):
            self._checkpoint.copy(name, (count, *rest), part, each)
        return target


def _by_module(cut: Cut, rows: Sequence[int]) -> Iterator[tuple[int, Cut]]:
    """The rows of each of several modules on top of one another, and what the cut takes of it."""
    first = 0
    for count in rows:
        taken = cut.rows
        if taken is not None:
            taken = taken[(taken >= first) & (taken < first + count)] - first
        yield count, Cut(taken, cut.inputs)
        first += count
