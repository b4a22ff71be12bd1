"""What replicas ask of a Ray cluster, what is kept together, and what their processes are told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from common.config import LinkSettings, ModelSettings
from common.errors import ConfigError
from common.link.inbox import check_routers
from services.launcher.on_ray.places import Needs, Spot, needs_of, tables_of_replica, text_of
from services.launcher.plan import Counts, Plan, make_plan

SPOT = Spot("10.0.0.5", "/run/a", "/run/node", 7001)


def plan(counts: Counts | None = None, **env: str) -> Plan:
    variables = {f"SLIPSTREAM_{name.upper()}": value for name, value in env.items()}
    return make_plan(None, variables, {}, counts or Counts())


def needs(has_gpus: bool = False, **env: str) -> Mapping[str, Mapping[str, float]]:
    return needs_of(plan(**env), has_gpus).by_service


def test_compute_takes_a_gpu_where_the_cluster_has_some() -> None:
    assert needs(has_gpus=True)["compute"] == {"CPU": 1.0, "GPU": 1.0}
    assert needs(has_gpus=False)["compute"] == {"CPU": 2.0}


def test_a_gpu_that_was_asked_for_is_waited_for_as_an_autoscaler_may_add_it() -> None:
    assert needs(compute__device="cuda")["compute"]["GPU"] == 1.0


def test_the_settings_say_how_much_each_service_takes() -> None:
    asked = needs(True, ray__compute_gpus="0.5", ray__compute_cpus="3", ray__router_cpus="2")
    assert asked["compute"] == {"CPU": 3.0, "GPU": 0.5}
    assert asked["router"] == {"CPU": 2.0}
    assert text_of(asked["compute"]) == "3 CPU, 0.5 GPU"


def test_a_compute_takes_what_all_its_processes_need() -> None:
    split = {"compute__tensor_parallel_size": "4"}
    assert needs(has_gpus=True, **split)["compute"] == {"CPU": 4.0, "GPU": 4.0}
    assert needs(has_gpus=False, **split)["compute"] == {"CPU": 8.0}
    given = plan(**split)
    model = ModelSettings.model_validate({"path": "/m"})
    tables = tables_of_replica(given, model, SPOT, needs_of(given, has_gpus=False))
    assert tables["compute"]["max_threads"] == 2


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"compute__pin": "on"}, "--pin on: Ray chooses the cores"),
        ({"compute__device": "cuda", "ray__compute_gpus": "0"}, "needs some of a GPU"),
        (
            {
                "compute__tensor_parallel_size": "2",
                "compute__device": "cuda",
                "ray__compute_gpus": "1",
            },
            "takes 2 whole GPUs for each compute",
        ),
        ({"compute__tensor_parallel_size": "2", "compute__device": "sim"}, "no model to split"),
        ({"compute__device": "tpu"}, "DEVICE: should be 'auto', 'cpu'"),
    ],
)
def test_what_cannot_be_had_on_ray_is_refused(env: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        needs(**env)


def test_a_compute_does_not_take_more_than_one_gpu() -> None:
    with pytest.raises(ConfigError, match=r"SLIPSTREAM_RAY__COMPUTE_GPUS"):
        plan(ray__compute_gpus="2")


def test_the_stages_of_a_ring_are_kept_together_and_routers_apart() -> None:
    cpu = {"CPU": 1.0}
    rings = Needs(dict.fromkeys(("router", "tokenizer", "compute", "detokenizer"), cpu))
    counts = Counts(router=3, tokenizer=1, compute=3, detokenizer=2)
    assert [list(rings.ring(counts, index)) for index in range(4)] == [
        ["compute", "tokenizer", "detokenizer"],
        ["compute", "detokenizer"],
        ["compute"],
        [],
    ]


def test_links_leave_the_node_with_keys_and_stay_on_it_without() -> None:
    given = plan(compute__max_num_seqs="7", links__curve_dir="/elsewhere", ray__router_cpus="1")
    model = ModelSettings.model_validate({"path": "/m"})
    tables = tables_of_replica(given, model, SPOT, needs_of(given, has_gpus=False))
    links = LinkSettings.model_validate(tables["links"])
    check_routers(links, None)
    assert (links.bind, links.local_dir) == ("tcp://10.0.0.5:7001", "/run/node")
    assert (links.curve_dir, links.routers) == ("/run/a/keys", ("file:///run/a/routers",))
    assert not links.insecure
    assert tables["compute"] == {"max_num_seqs": "7", "max_threads": 2}
    assert tables["model"]["path"] == "/m"
    assert "ray" not in tables


def test_an_inbox_may_be_at_an_ipv6_address() -> None:
    assert Spot("fd00::5", "/run/a", "/run/node").inbox == "tcp://[fd00::5]:0"
