#!/usr/bin/env bash
# Writes what kustomize shares with the Helm chart, out of the chart: the base, and the objects that
# components add. Run it after a change of the chart; kubernetes_manifests.py compares the rest.
set -euo pipefail
cd "$(dirname "$0")"

render() { # TEMPLATE FILE [OPTION ...]
  local template=$1 file=$2
  shift 2
  "${HELM:-helm}" template slipstream ../helm/slipstream --show-only "templates/$template.yaml" "$@" |
    sed -e '1{/^---$/d}' -e 's/[[:space:]]*$//' >"$file"
}

for template in router tokenizer compute detokenizer networkpolicies; do
  render "$template" "base/$template.yaml"
done
render pull components/hub-cache/pull.yaml --values overlays/gpu/values.yaml
render podmonitor components/pod-monitor/podmonitor.yaml --set podMonitor=true
for kind in hpa keda; do
  render autoscaling "components/$kind/autoscaling.yaml" --values "overlays/$kind/values.yaml"
done
render inferencepool components/inference-pool/inferencepool.yaml --values overlays/inference-pool/values.yaml
