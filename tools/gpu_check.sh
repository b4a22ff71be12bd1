#!/usr/bin/env bash
# On a machine with a GPU: the tests of kernels and runner on it, where there are several those of
# models on two and four of them, compute's other tests on that machine's torch, and the whole
# server on `--device cuda`, asked a question. Ends with a table and the names of what failed; exits
# non-zero if anything did. 16 cores take less than 5 minutes.
#
#   tools/gpu_check.sh             all of it, with the packages of pyproject.toml's dev extra
#   tools/gpu_check.sh tests       only the tests that need the GPU, as `make test-gpu` does
#
# Environment: PYTHON (python3), PROCESSES (of one test run; they share the GPU), PYTEST_ARGS (more
# arguments), LOG_DIR (where whole logs are kept), PORT (of the server).
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PORT=${PORT:-8123}
LOG_DIR=${LOG_DIR:-$(mktemp -d)}
cores=$(nproc)
PROCESSES=${PROCESSES:-$((cores < 4 ? 1 : cores > 16 ? 8 : cores / 2))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
failed=0
table=()

# phase NAME COMMAND…: run it, keep its log, add a row to the table.
phase() {
  local name=$1 log="$LOG_DIR/${1// /-}.log" began=$SECONDS verdict=ok
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$log"
  local status=${PIPESTATUS[0]}
  # 5 is pytest's "no tests were selected", as PYTEST_ARGS may have it
  if [ "$status" != 0 ] && [ "$status" != 5 ]; then
    verdict=FAILED
    failed=1
  fi
  table+=("$(printf '%-24s %-7s %4d s   %s' "$name" "$verdict" $((SECONDS - began)) \
    "$(tail -n 1 "$log" | tr -d = | cut -c 1-100)")")
}

# tests PROCESSES ARGUMENTS…: pytest, brief about what fails.
tests() {
  local processes=$1
  shift
  local parallel=() more=()
  [ "$processes" -gt 1 ] && parallel=(-n "$processes" --dist worksteal)
  eval "more=(${PYTEST_ARGS:-})"
  "$PYTHON" -m pytest "$@" "${parallel[@]}" -q --tb=short --show-capture=no --maxfail=40 \
    -o timeout=240 -p no:cacheprovider -p no:benchmark "${more[@]}"
}

# The server answers, and stops cleanly when it is asked to.
server() {
  local log="$LOG_DIR/server.log" answer held url="http://127.0.0.1:$PORT" ok=0
  "$PYTHON" -m services.cli serve --device cuda --port "$PORT" >"$log" 2>&1 &
  local pid=$!
  for _ in $(seq 240); do
    curl -fs "$url/ready" >/dev/null && break
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.5
  done
  answer=$(curl -s -m 60 "$url/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"model": "demo", "temperature": 0,
         "messages": [{"role": "user", "content": "What is the capital of France?"}]}')
  held=$(curl -s -m 60 "$url/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"model": "demo", "n": 16, "messages": [{"role": "user", "content": "Which?"}],
         "structured_outputs": {"regex": "(left|right) [0-9]{3}"}}')
  kill -INT "$pid" 2>/dev/null
  wait "$pid" || ok=1
  grep -E "model loaded|engine stopped|error|critical" "$log"
  grep -q Paris <<<"$answer" || ok=1
  # every one of the answers has the form that it was held to
  [ "$(grep -oE '"content":"(left|right) [0-9]{3}"' <<<"$held" | wc -l)" = 16 ] || ok=1
  [ "$ok" = 0 ] || tail -n 20 "$log"
  echo "answer: ${answer:-none}"
  echo "held to a form: ${held:0:300}"
  return "$ok"
}

"$PYTHON" -c 'import sys, torch, triton, transformers
if not torch.cuda.is_available():
    sys.exit("torch finds no CUDA device")
print("python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__,
      "transformers", transformers.__version__, torch.cuda.get_device_name())' || exit 1

# Everything that needs one GPU is in tests/kernels, and what needs more in tests/gpus.
phase "kernels and runner" tests "$PROCESSES" tests/kernels -m "not whole_gpu"
phase "the GPU for itself" tests 1 tests/kernels -m whole_gpu
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 1 ]; then  # a test has three to five processes of its own
  phase "several GPUs" tests $((3 * gpus < cores / 4 ? 3 * gpus : (cores + 3) / 4)) tests/gpus
fi
if [ "${1:-all}" = all ]; then
  phase "compute without GPU" tests "$PROCESSES" tests/unit/compute \
    tests/flow/test_compute_actor.py -m "not gpu"
  phase "the whole server" server
fi

echo
grep -hE "^(FAILED|ERROR) " "$LOG_DIR"/*.log | cut -c 1-300 | head -n 60
printf '%s\n' "${table[@]}"
echo "whole logs: $LOG_DIR"
[ "$failed" = 0 ] && echo "all of it works" || echo "something failed"
exit "$failed"
