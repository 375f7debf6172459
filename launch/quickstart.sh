#!/usr/bin/env bash
# Train the quickstart experiment on everything this machine has.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'TEXT'
Usage: bash launch/quickstart.sh [KEY=VALUE]...

Makes .venv if necessary, then trains the quickstart experiment, a mixture-of-experts GPT, on all GPUs of this machine
(on 2 CPU ranks if it has none), with the experts spread over the ranks. Arguments are config overrides, such as
training.steps=50. The same command resumes the run. The exit status is that of the run.
TEXT
    exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

# The largest number of ranks that divides both.
greatest_common_divisor() {
    local a=$1 b=$2 rest
    while ((b > 0)); do
        rest=$((a % b))
        a=$b
        b=$rest
    done
    echo "$a"
}

gpus=$(bash launch/count_gpus.sh)
if ((gpus > 0)); then
    ranks=$gpus
    echo "quickstart: $ranks GPU(s)"
else
    ranks=2
    echo "quickstart: no GPU; 2 CPU ranks"
fi

# The composed config has the number of experts, whatever the overrides; a wrong override ends the script here.
composed=$(.venv/bin/python train.py --cfg job --package moe "$@")
experts=$(sed -n 's/^ *num_experts: *\([0-9][0-9]*\) *$/\1/p' <<<"$composed")
expert_parallel=$(greatest_common_divisor "${experts:-1}" "$ranks")

# A step has eight sequences, spread evenly over the ranks, or one per rank if there are more ranks.
samples=$(((8 + ranks - 1) / ranks))

exec bash launch/torchrun.sh --ranks-per-node "$ranks" -- "parallel.expert=$expert_parallel" \
    "training.micro_batch_size=$samples" "training.global_batch_size=$((samples * ranks))" "$@"
