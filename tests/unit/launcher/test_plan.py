"""The launcher merges what the user set and adds what only it knows."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import TABLES, ModelSettings, Tables
from common.errors import ConfigError
from services.launcher.autoscale import CountRange
from services.launcher.plan import (
    SETTINGS,
    Counts,
    Plan,
    available_cpus,
    check_gpus_for,
    environment_of,
    gpus_in,
    make_plan,
    scaled_router,
    tables_of_run,
    toml_text,
)
from services.launcher.replicas import ScaleError

ROOT = Path(__file__).resolve().parents[3]

texts = st.text(st.characters(exclude_categories=["Cs"]))
plain: st.SearchStrategy[Any] = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.lists(texts, max_size=3)
    | st.dictionaries(texts, st.integers(0, 9), max_size=3)
)


def plan_of(
    options: Tables | None = None,
    counts: Counts | None = None,
    env: dict[str, str] | None = None,
    config: str | None = None,
) -> Plan:
    return make_plan(config, env or {}, options or {}, counts or Counts())


def test_an_option_goes_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[router]\nhost = "file"\nport = 1\ngrace_s = 2\n')
    env = {"SLIPSTREAM_ROUTER__HOST": "env", "SLIPSTREAM_ROUTER__PORT": "2"}
    plan = plan_of({"router": {"port": 3}}, env=env, config=str(path))
    assert plan.tables["router"] == {"host": "env", "port": 3, "grace_s": 2}


def test_services_get_a_setting_under_its_new_name_and_the_launcher_reports_the_old_one() -> None:
    plan = plan_of(env={"SLIPSTREAM_COMPUTE__GUIDE_AT_STARTUP": "false"})
    assert plan.tables["compute"] == {"grammar_at_startup": "false"}
    assert [renamed.setting for renamed in plan.renamed] == ["SLIPSTREAM_COMPUTE__GUIDE_AT_STARTUP"]


def test_an_old_name_stands_for_a_setting_and_goes_in_the_release_that_was_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for settings in SETTINGS.values():
        for old, (new, removed_in) in settings.RENAMED.items():
            assert old not in settings.model_fields
            assert new in settings.model_fields
            assert release(project["version"]) < release(removed_in)


def release(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("MODEL__PTAH", "x", "no such setting"),
        ("COMPUTE__TENSOR_PARALLEL_SIZE", "two", "should be a valid integer"),
        ("COMPUTE__KV_CACHE_DTYPE", "fp4", "should be 'auto', 'fp8' or 'int8'"),
        ("TOKENIZER__POOL_SIZ", "1", "no such setting; did you mean pool_size?"),
        ("ROUTER__PORT", "70000", "should be less than or equal to 65535"),
        ("DETOKENIZER__GRACE_S", "soon", "should be a valid number"),
        ("LINKS__ROUTER", "tcp://a:1", "no such setting; did you mean routers?"),
    ],
)
def test_a_mistake_in_any_table_is_named_before_a_model_is_looked_for(
    variable: str, value: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^SLIPSTREAM_{variable}: {re.escape(says)}"):
        plan_of(env={f"SLIPSTREAM_{variable}": value})


def test_a_run_has_its_own_inboxes_and_a_list_of_its_routers() -> None:
    plan = plan_of({"links": {"bind": "tcp://0.0.0.0:1"}}, Counts(router=2))
    tables = tables_of_run(plan, ModelSettings(path="/m", served_name=("m",)), "/run/x", "json")
    assert tables["links"]["bind"] == "ipc://{run_dir}/{name}.sock"
    assert tables["links"]["routers"] == ["file:///run/x/routers"]
    assert tables["model"]["path"] == "/m"
    assert tables["telemetry"]["log_format"] == "json"
    assert "compute" not in tables


def test_several_compute_processes_share_the_cores() -> None:
    model = ModelSettings(path="/m")
    several = tables_of_run(plan_of(counts=Counts(compute=64)), model, "/r", "json")
    assert several["compute"]["max_threads"] == 1
    chosen = plan_of({"compute": {"max_threads": 3}}, Counts(compute=2))
    assert tables_of_run(chosen, model, "/r", "json")["compute"]["max_threads"] == 3


def test_a_server_that_scales_itself_is_planned_for_the_most_it_may_become() -> None:
    ranges = {"compute": CountRange(0, 64), "tokenizer": CountRange(2, 4)}
    plan = make_plan(None, {}, {"router": {"api_keys": "k"}}, Counts(), ranges)
    assert plan.counts == Counts(tokenizer=2)
    tables = tables_of_run(plan, ModelSettings(path="/m"), "/r", "json")
    assert tables["compute"]["max_threads"] == 1
    assert len(tables["router"]["metrics_token"]) > 30  # with which the launcher asks
    assert tables["router"]["scaling_idle_s"] > 0
    placed = replace(plan, tables={**plan.tables, "router": scaled_router(plan)})
    assert scaled_router(placed) == placed.tables["router"]  # on Ray: the token of all routers
    open_to_all = make_plan(None, {}, {}, Counts(), {"tokenizer": CountRange(1, 4)})
    assert tables_of_run(open_to_all, ModelSettings(), "/r", "json")["router"] == {}
    with pytest.raises(ConfigError, match=r"--tokenizers 5 is above --autoscale tokenizers=2\.\.4"):
        make_plan(None, {}, {}, Counts(tokenizer=5), ranges)


def test_a_service_inherits_the_environment_but_for_our_settings() -> None:
    env = {"HOME": "/h", "SLIPSTREAM_ROUTER__PORT": "1"}
    inherited = environment_of("router-0", plan_of(), env, "/usr/lib/site-packages")
    assert inherited == {"HOME": "/h", "PYTHONSAFEPATH": "1"}


def test_a_source_tree_is_put_into_the_path_of_the_services() -> None:
    inherited = environment_of("router-0", plan_of(), {"PYTHONPATH": "/other"}, "/source")
    assert inherited["PYTHONPATH"] == "/source:/other"


def test_compute_processes_take_the_gpus_in_turn() -> None:
    plan = plan_of(counts=Counts(compute=3))
    env = {"CUDA_VISIBLE_DEVICES": "4,6"}
    given = [environment_of(name, plan, env, "/s") for name in plan.counts.names("compute")]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in given] == ["4", "6", "4"]
    assert environment_of("tokenizer-0", plan, env, "/s")["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert gpus_in({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.parametrize("size", ["tensor_parallel_size", "prefill_context_parallel_size"])
def test_processes_of_one_model_take_neighbours_and_share_the_cores(size: str) -> None:
    plan = plan_of({"compute": {size: 2}}, Counts(compute=2))
    env = {"CUDA_VISIBLE_DEVICES": "4,6,1,3,9"}
    names = ("compute-0", "compute-1")
    given = [environment_of(name, plan, env, "/s")["CUDA_VISIBLE_DEVICES"] for name in names]
    assert given == ["4,6", "1,3"]
    with pytest.raises(ScaleError, match="each takes 2 GPUs, and 5 can be used here"):
        check_gpus_for(2, plan, env)  # added later, by `slipstream scale`
    check_gpus_for(1, plan, env)
    tables = tables_of_run(plan, ModelSettings(path="/m"), "/r", "json")
    assert tables["compute"]["max_threads"] == max(1, (len(available_cpus()) - 1) // 4)
    assert plan_of({"compute": {"pipeline_parallel_size": 3}}).num_processes == 3


@pytest.mark.parametrize(
    ("compute", "needed"),
    [
        ({}, True),
        ({"device": "cpu"}, True),
        ({"device": "sim"}, False),
        ({"load_format": "dummy"}, False),
    ],
)
def test_weights_are_needed_unless_nothing_reads_them(
    compute: dict[str, str], needed: bool
) -> None:
    assert plan_of({"compute": dict(compute)}).needs_weights is needed


def test_the_launcher_waits_as_long_as_the_most_patient_service() -> None:
    assert plan_of({"compute": {"grace_s": 90}, "router": {"grace_s": "5"}}).grace_s == 90
    assert plan_of().grace_s == 30


@given(st.dictionaries(st.sampled_from(TABLES), st.dictionaries(texts, plain, max_size=4)))
def test_tables_read_back_as_they_were(tables: dict[str, dict[str, Any]]) -> None:
    assert tomllib.loads(toml_text(tables)) == tables
