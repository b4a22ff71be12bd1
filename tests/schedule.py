"""Which test files run one after another in one process, and when.

Files that want the same server run together: it is started once, not once in each process, and
ends with the last of them. A server takes 2 to 3 s of a core to start, and 2 % of one when idle.
What takes longest begins: else one process waits for another's at the end. And tests with servers,
which wait for much of their time, come among those that compute.
"""

from __future__ import annotations

from collections.abc import Iterable

UNITS = {  # the longest first; every other file is a unit of its own
    "the demo model": (
        "system/test_clients.py",
        "system/test_chat.py",
        "system/test_api_docs.py",
        "system/test_structured.py",
        "system/test_examples.py",
    ),
    "the virtual device": (
        "system/test_scale.py",
        "system/test_rolling_routers.py",
        "system/test_faults.py",
        "system/test_disconnects.py",
        "system/test_timeline.py",
        "system/test_serve.py",
        "system/test_bench.py",
        "system/test_pinning.py",
    ),
    "a browser": ("browser",),
    "faults at random": ("system/test_failover.py",),
    "an OpenAPI document": ("system/test_openapi.py",),
    "strict limits": (
        "system/test_bad_grammars.py",
        "system/test_bad_connections.py",
        "system/test_bad_requests.py",
        "system/test_fuzz.py",
    ),
    "a tiny model": (
        "system/test_whole_ring.py",
        "system/test_openai_client.py",
        "system/test_errors.py",
        "system/test_gguf.py",
        "system/test_responses_client.py",
    ),
}
_UNIT_OF = {f"tests/{path}": unit for unit, paths in UNITS.items() for path in paths}
_PLACES = {path: place for place, path in enumerate(_UNIT_OF)}


def unit_of(nodeid: str) -> str:
    """Return what a test runs together with: a unit, or else its file."""
    path = _listed(nodeid)
    return _UNIT_OF.get(path, path)


def places(nodeids: Iterable[str]) -> dict[str, tuple[float, int]]:
    """Return where tests come: the last server's when six of ten other units have begun."""
    tests = sorted(nodeids, key=_place_in_unit)
    units = tuple(dict.fromkeys(map(unit_of, tests)))
    served = [unit for unit in units if unit in UNITS or unit.startswith("tests/system/")]
    others = [unit for unit in units if unit not in served]
    place_of = {unit: 0.6 * place / len(served) for place, unit in enumerate(served)}
    place_of.update({unit: (place + 0.5) / len(others) for place, unit in enumerate(others)})
    return {test: (place_of[unit_of(test)], _place_in_unit(test)) for test in tests}


def _place_in_unit(nodeid: str) -> int:
    return _PLACES.get(_listed(nodeid), len(_PLACES))


def _listed(nodeid: str) -> str:
    """Return the path that a test is listed by, if it is: its folder's or its file's."""
    path = nodeid.partition("::")[0]
    folder = path.rpartition("/")[0]
    return folder if folder in _UNIT_OF else path
