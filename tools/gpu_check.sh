#!/usr/bin/env bash
# On a machine with a GPU: the GPU's tests, compute's tests on that machine's torch, and the whole
# server on `--device cuda`, asked a question. Prints what happened; exits non-zero if any failed.
#
#   tools/gpu_check.sh          with the packages of pyproject.toml's dev extra installed
set -uo pipefail
cd "$(dirname "$0")/.."
PORT=${PORT:-8123}
failed=0

python3 -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__,
    torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'

echo "== tests that need a GPU"
python3 -m pytest tests/unit/compute -m gpu -q -p no:cacheprovider -p no:benchmark || failed=1

echo "== compute's tests on this torch"
python3 -m pytest tests/unit/compute tests/flow/test_compute_actor.py -m "not gpu" -q -n 8 -p no:benchmark \
  -p no:cacheprovider || failed=1

echo "== the whole server on the GPU"
log=$(mktemp)
python3 -m services.cli serve --device cuda --port "$PORT" >"$log" 2>&1 &
server=$!
for _ in $(seq 120); do
  curl -fs "http://127.0.0.1:$PORT/ready" >/dev/null && break
  sleep 0.5
done
answer=$(curl -s "http://127.0.0.1:$PORT/v1/chat/completions" -H 'Content-Type: application/json' \
  -d '{"model": "demo", "temperature": 0,
       "messages": [{"role": "user", "content": "What is the capital of France?"}]}')
echo "$answer"
grep -q Paris <<<"$answer" || failed=1
kill -INT "$server"
wait "$server" || failed=1
grep -E "model loaded|engine stopped|error|critical" "$log"

[ "$failed" = 0 ] && echo "all of it works" || echo "something failed"
exit "$failed"
