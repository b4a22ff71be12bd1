#!/bin/sh
# Fills deploy/wheels with every wheel that the image build needs, by this machine's own pip and
# its settings (mirror, certificates, local folders). The build then asks no index at all.
#
#   deploy/wheelhouse.sh [PYTHON_VERSION] [EXTRA]
#
# PYTHON_VERSION is the base image's, 3.12 by default; EXTRA is `gpu` for the GPU image.
set -eu
cd "$(dirname "$0")/.."
version=${1:-3.12}
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
python3 deploy/requirements.py pyproject.toml --build ${2:+--extra "$2"} > "$requirements"
rm -f deploy/wheels/*.whl # of another version, or of constraints that have changed
python3 -m pip download --quiet --dest deploy/wheels --only-binary=:all: \
    --python-version "$version" --constraint constraints.txt --requirement "$requirements"
echo "deploy/wheels: $(ls deploy/wheels | wc -l) wheels for Python $version"
