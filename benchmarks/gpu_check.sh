#!/usr/bin/env bash
# All that needs a GPU to be verified, on a machine with one, without network, in at most 8 minutes: one table, and
# out/gpu_check.json. Exits with 0 when all passed, 1 when something failed, 3 when there is no GPU. --help lists options;
# PYTHON names an interpreter that has torch (built for CUDA), triton and transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
export HF_HUB_OFFLINE=1
exec timeout --kill-after=10 480 "$PYTHON" -m benchmarks.gpu_check "$@"
