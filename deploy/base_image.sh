#!/bin/sh
# Makes a base image with debootstrap, for engines that can't pull one: Debian bookworm with
# Python 3.11. Needs root, debootstrap and a Debian mirror.
#
#   deploy/base_image.sh [NAME]              default slipstream-base:bookworm
#   MIRROR=http://… deploy/base_image.sh     default: debootstrap's own choice
#   then: docker compose build --build-arg BASE_IMAGE=slipstream-base:bookworm
set -eu
name=${1:-slipstream-base:bookworm}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv \
    bookworm "$root" ${MIRROR:+"$MIRROR"} > "$root.log" 2>&1 || { tail "$root.log"; exit 1; }
rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar --directory "$root" --create . | docker import --change 'CMD ["python3"]' - "$name" > /dev/null
echo "made $name"
