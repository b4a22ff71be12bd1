#!/bin/sh
# Replaces the containers of services by those of the images that are there now, one after the
# other, while requests run: a successor is started and healthy before its predecessor is stopped.
#
#   deploy/roll.sh SERVICE…            from the folder of compose.yaml
#   COMPOSE="docker compose -f compose.yaml -f compose.proxy.yaml" deploy/roll.sh router
set -eu
compose=${COMPOSE:-docker compose}
for service in "$@"; do
    predecessors=$($compose ps --quiet "$service")
    count=$(echo "$predecessors" | wc -w)
    for predecessor in $predecessors; do
        $compose up --detach --wait --no-deps --no-recreate --scale "$service=$((count + 1))" "$service"
        docker stop "$predecessor" > /dev/null # within its stop_grace_period
        docker rm "$predecessor" > /dev/null
    done
done
