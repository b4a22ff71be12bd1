"""How many weights a folder's safetensors files hold, by their headers alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model_folder import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20  # as the format itself bounds it


def num_weights(folder: Path) -> int:
    """Count the numbers in all tensors; ModelError for a file that is missing or cut short."""
    return sum(_num_weights(folder / name) for name in _files(folder))


def _files(folder: Path) -> list[str]:
    """Return the files that are going to be read, as compute chooses them."""
    weight_map = read_json(folder, INDEX_NAME).get("weight_map")
    if isinstance(weight_map, dict):
        return sorted({str(name) for name in weight_map.values()})
    if (folder / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _num_weights(path: Path) -> int:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        tensors = list(header.values())
        end = 8 + size + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        count = sum(int(math.prod(tensor["shape"])) for tensor in tensors)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); is the download complete?"
        ) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} is not a readable safetensors file; download it again") from error
    if path.stat().st_size < end:
        raise ModelError(
            f"{path} is {path.stat().st_size:,} bytes long and should be {end:,}; download it again"
        )
    return count
