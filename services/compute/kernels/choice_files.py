"""Measured choices in files: those that are shipped for a device, and those of this machine.

A file has a line for each choice, so that a change of one is read as such: its key, what a launch
took with it and with the heuristic's, and the constants. The first line says for what device.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import structlog

from services.compute.kernels.choices import Key, Measured
from services.compute.kernels.experts.expert_matmul_config import ExpertConfig
from services.compute.kernels.linear.hopper_int4_config import Int4Config
from services.compute.kernels.linear.packed_matmul import PackedConfig
from services.compute.kernels.linear.quantized_matmul_config import QuantizedConfig
from services.compute.kernels.linear.skinny_matmul_config import SkinnyConfig

FORMAT = 3
"""Raised with every change of a kernel after which other constants may be best: a machine's own
file of another number is measured anew."""

SHIPPED = Path(__file__).with_name("measured")
CONFIGS: Mapping[str, type[Any]] = {
    "skinny_matmul": SkinnyConfig,
    "skinny_gate_up": SkinnyConfig,
    "quantized_matmul": QuantizedConfig,
    "packed_matmul": PackedConfig,
    "expert_gate_up": ExpertConfig,
    "expert_down": ExpertConfig,
    "quantized_gate_up": ExpertConfig,
    "quantized_down": ExpertConfig,
    "hopper_int4": Int4Config,
}
"""The constants of each kernel."""

HEAD = {"format": int, "device": str}
LINE = {
    "kernel": str, "form": str, "num_out": int, "num_in": int, "num_tokens": int, "us": float,
    "default_us": float, "config": dict,
}  # fmt: skip
NAMES = {
    int: "a number from 1 on", float: "a number with a point", str: "text",
    bool: "true or false", dict: "an object",
}  # fmt: skip

Found: TypeAlias = dict[Key, Measured[Any]]


class ChoiceFileError(ValueError):
    """A file that is not as it should be; says which line, and what of it."""


def file_in(folder: Path, device: str) -> Path:
    return folder / f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.jsonl"


def read(path: Path, device: str) -> Found:
    """What the file says, or nothing where there is none; ChoiceFileError or OSError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise ChoiceFileError(f"{path}: {error}") from error
    found: Found = {}
    for number, line in enumerate(lines or [""], 1):
        try:
            if number == 1:
                _check_head(line, device)
            else:
                key, choice = _choice(line)
                _check(key not in found, "the line says again what one above says")
                found[key] = choice
        except ValueError as error:
            raise ChoiceFileError(f"{path}, line {number}: {error}") from error
    return found


def read_own(path: Path, device: str) -> Found:
    """The same for this machine's own file, which may be lost: then it is measured anew."""
    try:
        return read(path, device)
    except (ChoiceFileError, OSError) as error:
        structlog.get_logger().warning("measured choices are not used", error=str(error))
        return {}


def keep(path: Path, device: str, choices: Found) -> bool:
    """Add these to this machine's own file; where that cannot be, the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, device, read_own(path, device) | choices)
    except OSError as error:
        structlog.get_logger().warning("measured choices are not kept", error=str(error))
        return False
    return True


def write(path: Path, device: str, choices: Found) -> None:
    """Replace the file at once; nobody reads half of it."""
    lines = [json.dumps({"format": FORMAT, "device": device})]
    for key, choice in sorted(choices.items(), key=lambda item: item[0]):
        times = {"us": round(choice.us, 2), "default_us": round(choice.default_us, 2)}
        lines.append(json.dumps({**key._asdict(), **times, "config": asdict(choice.config)}))
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")  # containers share process ids
    try:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ValueError(problem)


def _check_head(line: str, device: str) -> None:
    head = _values(line, HEAD)
    _check(head["format"] == FORMAT, f"format is {head['format']}, and this version's is {FORMAT}")
    _check(head["device"] == device, f"device is {head['device']!r}, and this one is {device!r}")


def _choice(line: str) -> tuple[Key, Measured[Any]]:
    values = _values(line, LINE)
    kind = CONFIGS.get(values["kernel"])
    if kind is None:
        raise ValueError(f"kernel is {values['kernel']!r}; known are {', '.join(CONFIGS)}")
    none = {field.name: field.default for field in fields(kind)}
    config = kind(**_typed(values.pop("config"), get_type_hints(kind), "config.", none))
    us, default_us = values.pop("us"), values.pop("default_us")
    return Key(**values), Measured(config, us, default_us)


def _values(line: str, types: Mapping[str, type[Any]]) -> dict[str, Any]:
    values = json.loads(line)
    _check(isinstance(values, dict), "it should be an object")
    return _typed(values, types, "", {})


def _typed(
    values: dict[str, Any], types: Mapping[str, type[Any]], path: str, none: Mapping[str, object]
) -> dict[str, Any]:
    """These values, all of the types and no others; `none`: what may stand for no number."""
    for name in values:
        _check(name in types, f"unknown: {path}{name}")
    for name, kind in types.items():
        _check(name in values, f"missing: {path}{name}")
        value = values[name]
        is_kind = type(value) is kind and (kind is not int or value > 0 or value == none.get(name))
        _check(is_kind, f"{path}{name} should be {NAMES[kind]} (it is {value!r})")
    return values
