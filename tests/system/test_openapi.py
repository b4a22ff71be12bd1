"""The OpenAPI document is true: what schemathesis makes of it meets nothing that is not in it.

It sends what the document allows, which is answered but for reasons that no schema can say, and
what it does not allow; it looks at the status, the content type and the shape of every answer. The
server has a virtual device, so answers are quick and any text.
"""

from __future__ import annotations

import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from benchmarks.stack import Stack
from services.router.openapi.document import build_document
from tests.cases import num_cases
from tests.patience import PATIENCE_S
from tests.system.conftest import SimStack
from tests.system.ring import wait_empty
from tests.system.unsayable import is_unsayable

EXAMPLES = num_cases(3, exploring=40)  # of each operation, allowed ones and others

pytestmark = pytest.mark.hypothesis  # so that `make fuzz` runs it

load_all_checks()
# What is wrong may be refused for its size before anybody sees that it is.
CONFIG = schemathesis.Config.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": ["400", "404", "413", "415"]}}}
)
LEFT_OUT = CHECKS.get_by_names(["positive_data_acceptance"])  # we know better, below
# What only the model knows: its vocabulary, its length, whether it embeds, and its grammars.
OF_THE_MODEL = re.compile(
    r"vocabulary|not a token id|context|tokens|no token of this model|makes no embeddings|grammar"
    r"|template"
)
OPERATIONS = [
    pytest.param(method, path, mode, id=f"{method} {path} {mode.value}")
    for path, methods in build_document("0")["paths"].items()
    for method, operation in methods.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode.is_positive or "requestBody" in operation or "parameters" in operation
]


@pytest.fixture(scope="module")
def quick_stack(sim_folder: Path) -> Iterator[Stack]:
    """A server whose longest answer is short: what is asked at random asks for as much as fits."""
    settings = {"compute.sim_step_base_s": 0.0001, "compute.max_model_len": 160}
    with SimStack(sim_folder, settings=settings) as stack:
        yield stack


def document_of(stack: Stack) -> dict[str, Any]:
    """Read the document, with the name of the model in it: else nearly all answers were 404."""
    with urllib.request.urlopen(f"{stack.url}/openapi.json", timeout=PATIENCE_S) as answer:
        document: dict[str, Any] = json.load(answer)
    schemas = document["components"]["schemas"].values()
    for schema in itertools.chain.from_iterable(each.get("anyOf", [each]) for each in schemas):
        properties = schema.get("properties", {})
        if "model" in properties and schema.get("additionalProperties") is not False:
            may_be_null = "anyOf" in properties["model"]
            properties["model"] = {"enum": ["sim", None] if may_be_null else ["sim"]}
    document["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["schema"] = {
        "enum": ["sim", "other"]
    }
    return document


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_nothing_undocumented_is_answered(
    method: str, path: str, mode: GenerationMode, quick_stack: Stack
) -> None:
    document = document_of(quick_stack)
    operation = schemathesis.openapi.from_dict(document, config=CONFIG)[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        response = case.call_and_validate(
            base_url=quick_stack.url, timeout=PATIENCE_S, excluded_checks=LEFT_OUT
        )
        if mode.is_positive and response.status_code == 400:
            error = response.json()["error"]
            message = error if isinstance(error, str) else error["message"]
            known = is_unsayable(path, message, message) or OF_THE_MODEL.search(message)
            assert known, (case.body, message)

    ask()


def test_the_document_has_every_route_and_no_other(quick_stack: Stack) -> None:
    for path, operations in document_of(quick_stack)["paths"].items():
        for method in operations:
            request = urllib.request.Request(
                quick_stack.url + _filled(path, quick_stack),
                data=b"" if method == "post" else None,
                method=method.upper(),
            )
            try:
                status = urllib.request.urlopen(request, timeout=PATIENCE_S).status
            except urllib.error.HTTPError as error:
                status = error.code
            assert status not in (404, 405), (method, path)
    wait_empty(quick_stack)


def _filled(path: str, stack: Stack) -> str:
    """Put names into a path of what is there."""
    if "{response_id}" in path:
        body = {"model": "sim", "input": "Hi", "max_output_tokens": 2, "background": True}
        request = urllib.request.Request(
            f"{stack.url}/v1/responses",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            path = path.replace("{response_id}", json.load(answer)["id"])
    return path.replace("{model}", "sim")
