"""The body of `/v1/embeddings`."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from common.messages.control import Matryoshka
from common.messages.failure import Failure, Usage
from services.router.answer import Answer, ResponseHead
from services.router.errors import ApiError, bad_field


class EmbeddingFormat:
    """Vectors as numbers or, with `as_base64`, as the bytes of little-endian float32.

    `dimensions`, if the client named a number, must be the model's, or fewer that are enough for
    one that is `matryoshka`.
    """

    def __init__(
        self,
        head: ResponseHead,
        as_base64: bool,
        dimensions: int | None,
        matryoshka: Matryoshka | None = None,
    ) -> None:
        self._head = head
        self._as_base64 = as_base64
        self._dimensions = dimensions
        self._matryoshka = matryoshka

    def body(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Build the list of embeddings; ApiError 400 for other dimensions than the model's."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(answer)}
            for index, answer in enumerate(answers)
        ]
        tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"object": "list", "data": data, "model": self._head.model, "usage": tokens}

    def _vector(self, answer: Answer) -> str | list[float]:
        packed = answer.ended.embedding
        if not packed:
            raise ApiError(Failure(500, "internal_error", "the model made no embedding"))
        vector = self._cut(array("f", packed))
        if not self._as_base64:
            return vector.tolist()
        if sys.byteorder == "big":
            vector.byteswap()
        return base64.b64encode(vector.tobytes()).decode()

    def _cut(self, vector: array[float]) -> array[float]:
        """Keep the first numbers that were asked for; ApiError 400 where they are no embedding."""
        wanted, cut = self._dimensions, self._matryoshka
        if wanted is None or wanted == len(vector):
            return vector
        if cut is None or wanted > len(vector) or (cut.sizes and wanted not in cut.sizes):
            sizes = () if cut is None else cut.sizes
            most = f"1 to {len(vector)}" if cut is not None and not sizes else f"{len(vector)}"
            may = ", ".join(map(str, (*(size for size in sizes if size < len(vector)), most)))
            raise bad_field(
                "dimensions",
                f"may only be {may}, which this model's embeddings have (it is {wanted})",
            )
        kept = vector[:wanted]
        length = math.hypot(*kept) if cut.normalize else 1.0
        return array("f", (value / (length or 1.0) for value in kept))
