"""The ring as a whole: equal to transformers, spread over its workers, traced, guarded by keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S
from tests.system.collector import Collector
from tests.system.conftest import SimStack, async_client_of, client_of
from tests.system.ring import wait_empty

PROMPTS = (
    "The capital of France is",
    "One, two, three, four, five",
    "Über den Wolken; 東京は",
    "A train leaves the station. " * 20,
)
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_ID = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> dict[str, str]:
    """What transformers says, alone and greedy, by prompt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    texts = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**inputs, max_new_tokens=48, do_sample=False)[0]
        new = ids[inputs["input_ids"].shape[1] :]
        texts[prompt] = tokenizer.decode(new, skip_special_tokens=True)
    return texts


def test_greedy_text_over_http_equals_that_of_transformers(
    client: OpenAI, expected: dict[str, str]
) -> None:
    for prompt, text in expected.items():
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=48, temperature=0.0
        )
        assert answer.choices[0].text == text


async def test_so_does_the_text_of_requests_that_are_computed_together(
    tiny_stack: Stack, expected: dict[str, str]
) -> None:
    async with async_client_of(tiny_stack) as client:
        found = await asyncio.gather(
            *(
                client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=48, temperature=0.0
                )
                for prompt in PROMPTS * 5
            )
        )
    assert [each.choices[0].text for each in found] == [*expected.values()] * 5


async def test_requests_spread_over_several_workers_of_each_service(sim_folder: Path) -> None:
    options = ("--traces", "console")
    counts = ("--tokenizers", "2", "--computes", "2", "--detokenizers", "2", "--routers", "2")
    settings = {"compute.sim_step_base_s": 0.01, "router.api_keys": "one,two"}
    with SimStack(sim_folder, *options, *counts, settings=settings) as stack:
        assert len(stack.pids()) == 8
        with client_of(stack, "three") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        async with async_client_of(stack) as client:
            found = await asyncio.gather(
                *(
                    client.with_options(api_key="two").completions.create(
                        model="sim",
                        prompt=f"Number {number}",
                        max_tokens=40,
                        extra_body={"ignore_eos": True},
                    )
                    for number in range(40)
                )
            )
        assert all(each.usage and each.usage.completion_tokens == 40 for each in found)
        wait_empty(stack)
        for service, span in (
            ("tokenizer", "tokenize"),
            ("compute", "generate"),
            ("detokenizer", "detokenize"),
        ):
            for number in range(2):
                line = f"span {service}-{number} {span} "
                stack.wait_until(lambda line=line: stack.log().count(line) >= 5, PATIENCE_S, line)
        assert stack.stop() == 0


def test_a_request_is_one_trace_through_all_four_services(
    sim_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with Collector() as collector:
        options = ("--traces", collector.url)
        with SimStack(sim_folder, *options) as stack:
            with client_of(stack) as client:
                client.chat.completions.create(
                    model="sim",
                    messages=[{"role": "user", "content": "Hi"}],
                    max_tokens=5,
                    extra_headers={"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"},
                )
            stack.wait_until(lambda: len(collector.trace(TRACE_ID)) >= 4, PATIENCE_S, "traced")
            assert stack.stop() == 0
        spans = {span.service: span for span in collector.trace(TRACE_ID)}
        assert set(spans) == {"router-0", "tokenizer-0", "compute-0", "detokenizer-0"}
        parents = {CALLER_ID} | {span.span_id for span in spans.values()}
        assert spans["router-0"].parent_id == CALLER_ID
        assert spans["router-0"].name == "chat sim"
        assert all(span.parent_id in parents for span in spans.values())
        assert len({span.span_id for span in spans.values()}) == 4
