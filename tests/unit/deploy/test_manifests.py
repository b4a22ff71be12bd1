"""The Kubernetes manifests: valid, restricted, fit for the services, the same from the chart."""

from __future__ import annotations

import copy
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import load as load_settings
from services.launcher.plan import SETTINGS

ROOT = Path(__file__).resolve().parents[3]
NEWEST = "1.37"
TO_ACCEPT_NO_MORE_S = 5  # what a router's preStop waits
TO_END_S = 15  # after grace_s, docs/operations.md
RING = {
    *((("router", worker)) for worker in ("tokenizer", "compute", "detokenizer")),
    *((worker, "router") for worker in ("tokenizer", "compute", "detokenizer")),
    *(("tokenizer", "compute"), ("compute", "detokenizer"), ("detokenizer", "compute")),
}


def load_module() -> Any:
    spec = importlib.util.spec_from_file_location("manifests", ROOT / "deploy" / "manifests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


manifests = load_module()
OBJECTS = list(manifests.written())
needs_kubectl = pytest.mark.skipif(not shutil.which(manifests.KUBECTL), reason="no kubectl here")
needs_helm = pytest.mark.skipif(not shutil.which(manifests.HELM), reason="no helm here")
needs_schemas = pytest.mark.skipif(
    not importlib.util.find_spec("kubernetes_validate"), reason="no kubernetes-validate here"
)


def deployments() -> dict[str, Any]:
    return {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each
        for each in OBJECTS
        if each["kind"] == "Deployment"
    }


@needs_schemas
def test_every_object_is_one_that_kubernetes_knows() -> None:
    assert [why for each in OBJECTS if (why := manifests.invalid(each, NEWEST))] == []


@needs_schemas
def test_a_field_that_does_not_exist_is_found() -> None:
    deployment = copy.deepcopy(deployments()["compute"])
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbes"] = {}
    assert "livenessProbes" in manifests.invalid(deployment, NEWEST)
    scaled = copy.deepcopy(next(each for each in OBJECTS if each["kind"] == "ScaledObject"))
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 1
    assert "1 is not of type 'string'" in manifests.invalid(scaled, NEWEST)


def test_every_pod_meets_the_restricted_standard_on_a_read_only_root() -> None:
    assert [what for each in OBJECTS for what in manifests.unrestricted(each)] == []
    deployment = copy.deepcopy(deployments()["router"])
    del deployment["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert len(manifests.unrestricted(deployment)) == 3


def test_the_network_has_the_rings_edges_alone_at_both_of_their_ends() -> None:
    assert manifests.edges(OBJECTS, 7000) == (RING, RING)


@pytest.mark.parametrize("service", deployments())
def test_a_service_takes_the_settings_of_its_pod_and_has_the_time_to_drain(service: str) -> None:
    pod = manifests.pod_of(deployments()[service])
    container = pod["containers"][0]
    env = {each["name"]: each.get("value", "1") for each in container["env"]}
    file = ROOT / "deploy" / "slipstream.toml"
    config = load_settings(SETTINGS[service], service, file, env)
    assert config.links.routers == ("tcp://slipstream-routers:7000",)
    waits_s = TO_ACCEPT_NO_MORE_S if "lifecycle" in container else 0
    assert pod["terminationGracePeriodSeconds"] >= waits_s + config.own.grace_s + TO_END_S
    probes = {
        name: container[f"{name}Probe"]["exec"]["command"] for name in ("liveness", "startup")
    }
    assert set(map(tuple, probes.values())) == {("slipstream", "health", service, "--live")}
    assert container["readinessProbe"]["exec"]["command"] == ["slipstream", "health", service]


@pytest.mark.parametrize("folder", manifests.overlays(), ids=lambda folder: folder.name)
def test_the_settings_of_an_overlay_exist(folder: Path) -> None:
    values = yaml.safe_load((folder / "values.yaml").read_text())
    for service, settings in SETTINGS.items():
        env = {each["name"]: each["value"] for each in values.get(service, {}).get("env", [])}
        load_settings(settings, service, ROOT / "deploy" / "slipstream.toml", env)


def test_a_router_is_left_to_hold_requests_before_it_counts_as_not_ready() -> None:
    probe = manifests.pod_of(deployments()["router"])["containers"][0]["readinessProbe"]
    hold_s = SETTINGS["router"]().hold_s
    assert probe["periodSeconds"] * probe["failureThreshold"] > hold_s


@needs_kubectl
@needs_schemas
@pytest.mark.parametrize("folder", manifests.overlays(), ids=lambda folder: folder.name)
def test_an_overlay_is_valid_and_restricted(folder: Path) -> None:
    changed = [each for each in manifests.kustomized(folder) if each not in OBJECTS]
    assert changed
    assert [why for each in changed if (why := manifests.invalid(each, NEWEST))] == []
    assert [what for each in changed for what in manifests.unrestricted(each)] == []


@needs_kubectl
@needs_helm
@pytest.mark.parametrize(
    "folder", [manifests.BASE, *manifests.overlays()], ids=lambda folder: folder.name
)
def test_the_chart_gives_the_same_objects_as_kustomize(folder: Path) -> None:
    values = None if folder == manifests.BASE else folder / "values.yaml"
    assert manifests.differences(manifests.kustomized(folder), manifests.charted(values)) == []


def test_objects_differ_by_what_they_have_and_not_by_its_order() -> None:
    def pod(*env: dict[str, str]) -> dict[str, Any]:
        return {"kind": "Pod", "metadata": {"name": "x"}, "spec": {"env": list(env)}}

    one, two = {"name": "ONE", "value": "1"}, {"name": "TWO", "value": "2"}
    assert manifests.differences([pod(one, two)], [pod(two, one)]) == []
    changed = manifests.differences([pod(one)], [pod({**one, "value": "3"})])
    assert changed == ['Pod x.spec.env[0].value: "1" is not "3"']
    assert manifests.differences([pod(one)], []) == ["Pod x: only one has it"]
