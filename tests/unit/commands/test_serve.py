"""What is typed after `slipstream serve` becomes settings and counts, and mistakes are named."""

from __future__ import annotations

import argparse

import pytest

from services.commands.command import Parser
from services.commands.serve import add_options, tables_of
from services.launcher.plan import Counts


def serve_parser() -> Parser:
    parser = Parser("slipstream serve", "", "", {})
    add_options(parser)
    return parser


def parsed(*arguments: str) -> argparse.Namespace:
    return serve_parser().parse_args(arguments)


def test_without_options_nothing_is_set() -> None:
    assert tables_of(parsed()) == ({}, Counts())


def test_every_option_is_a_setting_of_its_table() -> None:
    tables, _ = tables_of(
        parsed("m", "--port=9", "--served-model-name=n", "--device=sim", "--swap-space=1.5")
    )
    assert tables == {
        "model": {"path": "m", "served_name": ["n"]},
        "router": {"port": 9},
        "compute": {"device": "sim", "swap_space": 1.5},
    }


def test_several_keys_may_be_given() -> None:
    tables, _ = tables_of(parsed("--api-key=a", "--api-key", "b"))
    assert tables == {"router": {"api_keys": ["a", "b"]}}


def test_a_model_is_split_and_copied_by_the_names_that_people_know() -> None:
    expected = {"compute": {"tensor_parallel_size": 2}}, Counts(compute=3)
    assert tables_of(parsed("-tp", "2", "-dp", "3")) == expected
    long = parsed("--tensor-parallel-size=2", "--data-parallel-size=3")
    assert tables_of(long) == expected
    for option in ("-ep", "--enable-expert-parallel"):
        assert tables_of(parsed(option))[0] == {"compute": {"enable_expert_parallel": True}}
    staged = {"compute": {"pipeline_parallel_size": 2}}, Counts()
    assert tables_of(parsed("-pp", "2")) == staged
    shared = {"compute": {"prefill_context_parallel_size": 2}}, Counts()
    assert tables_of(parsed("-pcp", "2")) == shared
    assert tables_of(parsed("--pipeline-parallel-size=2")) == staged


def test_options_may_be_written_as_vllm_takes_them() -> None:
    words = ["my_model", "--tensor_parallel_size=2", "--dtype", "float32", "-sc", "off"]
    tables, _ = tables_of(serve_parser().parse([*words, "--enable_eplb"]))
    assert tables["model"] == {"path": "my_model"}
    assert tables["compute"] == {
        "tensor_parallel_size": 2,
        "dtype": "float32",
        "speculative_config": "off",
        "enable_eplb": True,
    }


def test_services_are_counted_one_by_one() -> None:
    _, counts = tables_of(parsed("--computes=2", "--routers=3"))
    assert counts == Counts(compute=2, router=3)
    assert counts.names("router") == ("router-0", "router-1", "router-2")


def test_the_options_of_the_issue_are_all_there() -> None:
    options = (
        "--host --port --device --dtype --load-format --served-model-name --max-model-len "
        "--max-num-seqs --max-prefill-tokens --max-batched-token-mem --swap-space "
        "--gpu-memory-utilization --max-input-length --max-output-length --tokenizers --computes "
        "--detokenizers --routers --config"
    ).split()
    assert set(options) <= set(serve_parser().format_help().replace("[", " ").split())


@pytest.mark.parametrize(
    "argument",
    [
        "--computes=0",
        "--max-num-seqs=-1",
        "--device=tpu",
        "--gpu-memory-utilization=1.5",
        "--swap-space=-1",
        "--swap-space=inf",
        "--port=http",
        "--api-key=",
        "--computes=100000",
        "--max-num-seqs=1000000000",
        "--tensor-parallel-size=0",
        "--tensor-parallel-size=65",
        "--data-parallel-size=0",
        "--chat-template=/no/such/file",
    ],
)
def test_a_value_that_makes_no_sense_is_refused(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(argument)
    assert caught.value.code == 2
    assert argument.partition("=")[0] in capsys.readouterr().err
