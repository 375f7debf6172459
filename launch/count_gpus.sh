#!/usr/bin/env bash
# Prints how many GPUs a process started here may use.
set -euo pipefail

if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true
elif command -v nvidia-smi >/dev/null; then
    # A driver that answers with an error lists no GPU.
    { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
else
    echo 0
fi
