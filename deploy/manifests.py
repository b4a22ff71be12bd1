"""The Kubernetes manifests as objects: rendered, compared, and judged without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = dict[str, Any]

DEPLOY = Path(__file__).resolve().parent
KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
CHART = DEPLOY / "helm" / "slipstream"
CUSTOM_SCHEMAS = KUBERNETES / "custom_schemas.yaml"
RELEASE = "slipstream"
KUBECTL = os.environ.get("KUBECTL", "kubectl")
HELM = os.environ.get("HELM", "helm")


def overlays() -> list[Path]:
    """The folders of all overlays; each has the values that make the chart the same."""
    return sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))


def loaded(text: str) -> list[Manifest]:
    """The objects of a stream of YAML documents."""
    return [each for each in yaml.safe_load_all(text) if each]


def written() -> Iterator[Manifest]:
    """The objects that stand in our files as they are, without kustomizations and their patches."""
    for path in sorted((*BASE.glob("*.yaml"), *KUBERNETES.glob("components/*/*.yaml"))):
        if path.name != "kustomization.yaml":
            yield from loaded(path.read_text())


def kustomized(folder: Path) -> list[Manifest]:
    """What `kubectl apply -k` would send."""
    return loaded(_output(KUBECTL, "kustomize", str(folder)))


def charted(values: Path | None = None) -> list[Manifest]:
    """What `helm install` would send."""
    options = ["--values", str(values)] if values else []
    return loaded(_output(HELM, "template", RELEASE, str(CHART), *options))


def lost_by_kubectl(deployments: list[Manifest]) -> list[str]:
    """What kubectl's own types do not take over from Deployments: fields that it does not know."""
    given = "\n---\n".join(json.dumps(each) for each in deployments)
    options = ("--filename", "-", "--output", "json", "CHECKED=yes")
    said = _output(KUBECTL, "set", "env", "--local", *options, given=given)
    decoder, read = json.JSONDecoder(), []
    while said := said.strip():
        each, end = decoder.raw_decode(said)
        said = said[end:]
        read.append(each)
    found = differences(deployments, read)
    return [each for each in found if ": null is not" not in each and "CHECKED" not in each]


def _output(*command: str, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ValueError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def name_of(manifest: Manifest) -> str:
    """Kind and name, which tell an object from all others of its namespace."""
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def differences(left: Iterable[Manifest], right: Iterable[Manifest]) -> list[str]:
    """How two sets of objects differ; the order of what has names does not count."""
    ours = {name_of(each): _ordered(each) for each in left}
    theirs = {name_of(each): _ordered(each) for each in right}
    found = [f"{name}: only one has it" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        found += [f"{name}{where}" for where in _unequal(ours[name], theirs[name])]
    return found


def _ordered(value: Any) -> Any:
    """Sort lists of named things, as of variables and volumes."""
    if isinstance(value, dict):
        return {key: _ordered(each) for key, each in value.items()}
    if isinstance(value, list):
        each_has_name = all(isinstance(each, dict) and "name" in each for each in value)
        ordered = [_ordered(each) for each in value]
        return sorted(ordered, key=lambda each: str(each["name"])) if each_has_name else ordered
    return value


def _unequal(left: Any, right: Any, where: str = "") -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            yield from _unequal(left.get(key), right.get(key), f"{where}.{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from _unequal(*pair, f"{where}[{index}]")
    elif left != right:
        yield f"{where}: {json.dumps(left)} is not {json.dumps(right)}"


def invalid(manifest: Manifest, version: str) -> str:
    """What is wrong with an object for this version of Kubernetes; unknown fields are, too."""
    import jsonschema
    import kubernetes_validate

    schemas = yaml.safe_load(CUSTOM_SCHEMAS.read_text())
    try:
        schema = schemas.get(f"{manifest['apiVersion']}/{manifest['kind']}")
        if schema is not None:
            jsonschema.validate(manifest["spec"], schema)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
    except jsonschema.ValidationError as error:
        return f"{name_of(manifest)}: {error.message}"
    return ""


def pod_of(manifest: Manifest) -> Manifest | None:
    """The pod's specification in an object that makes pods."""
    pod: Manifest | None = manifest["spec"].get("template", {}).get("spec")
    return pod


def unrestricted(manifest: Manifest) -> list[str]:
    """What the restricted pod security standard, or a read-only root, lacks in an object's pods."""
    pod = pod_of(manifest)
    if pod is None:
        return []
    security = pod.get("securityContext", {})
    wanted = {
        "runAsNonRoot": security.get("runAsNonRoot") is True,
        "runAsUser": security.get("runAsUser", 0) > 0,
        "seccompProfile": security.get("seccompProfile") == {"type": "RuntimeDefault"},
        "no host's namespaces": not any(
            pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")
        ),
        "volumes": all(
            {"emptyDir", "secret", "configMap", "persistentVolumeClaim"} & volume.keys()
            for volume in pod.get("volumes", [])
        ),
        "no token": pod.get("automountServiceAccountToken") is False,
    }
    for container in pod["containers"]:
        own = container.get("securityContext", {})
        wanted |= {
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
            "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "limits.memory": "memory" in container["resources"]["limits"],
        }
    return [f"{name_of(manifest)}: {what}" for what, holds in wanted.items() if not holds]


def edges(manifests: Iterable[Manifest], port: int) -> tuple[set[tuple[str, str]], ...]:
    """Which components' pods may send to which at a port: as egress says, and as ingress says."""
    out, into = set(), set()
    for policy in manifests:
        if policy["kind"] != "NetworkPolicy":
            continue
        own = _component(policy["spec"]["podSelector"])
        for rule in policy["spec"].get("egress", []):
            out |= {(own, _component(peer["podSelector"])) for peer in _peers(rule, "to", port)}
        for rule in policy["spec"].get("ingress", []):
            into |= {(_component(peer["podSelector"]), own) for peer in _peers(rule, "from", port)}
    return out, into


def _peers(rule: Manifest, direction: str, port: int) -> list[Manifest]:
    return rule.get(direction, []) if {"protocol": "TCP", "port": port} in rule["ports"] else []


def _component(selector: Manifest) -> str:
    return str(selector["matchLabels"]["app.kubernetes.io/component"])
