#!/usr/bin/env bash
# What this machine's GPUs do with Mixtrain: set-up, the tests for GPUs, training speed and MoE layers, in one file.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash launch/gpu_check.sh [--system-torch] [--wheels DIR] [OPTION]...

On a machine with one or more GPUs: sets .venv up if need be, runs the tests marked gpu, measures training of gpt2_124m
and gpt_moe_small and one MoE layer of three published models beside Megatron-core's own, and writes
benchmarks/results/gpu-NAME.md, within ten minutes after the set-up.

  --system-torch  take the torch that this machine's Python has, and install none
  --wheels DIR    set up from this folder of wheels, without a network; launch/wheels.sh fills one
  OPTION          goes to `python -m benchmarks.gpu_check`: --minutes 20, --results DIR, --small (tiny sizes),
                  --experiments NAME, --shapes NAME

The exit status is 0 if everything went well, 1 if a step did not, which the file says, and 2 if there is nothing to run
on.
TEXT
}

die() {
    echo "gpu_check: $*" >&2
    exit 2
}

root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
setup_arguments=(--extra dev)
system_torch=
options=()
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --system-torch)
            system_torch=1
            setup_arguments+=("$1")
            shift
            ;;
        --wheels)
            [[ -d ${2:-} ]] || die "--wheels needs a folder that exists, not '${2:-}'; fill one on a machine with a network: bash launch/wheels.sh DIR"
            setup_arguments+=("$1" "$(realpath -- "$2")")
            shift 2
            ;;
        --results)
            [[ -n ${2:-} ]] || die "--results needs a folder"
            options+=("$1" "$(realpath -m -- "$2")")
            shift 2
            ;;
        --minutes)
            [[ ${2:-} =~ ^[0-9]+$ && $2 -gt 0 ]] || die "--minutes=${2:-} must be a whole number of at least 1, such as 10"
            options+=("$1" "$2")
            shift 2
            ;;
        --small | --json)
            options+=("$1")
            shift
            ;;
        --experiments | --shapes)
            [[ -n ${2:-} ]] || die "$1 needs a name"
            options+=("$1" "$2")
            shift 2
            ;;
        *)
            die "unknown option $1; see bash launch/gpu_check.sh --help"
            ;;
    esac
done
cd "$root"

# Before the set-up, which takes minutes. A container may have a GPU without nvidia-smi: there torch is asked, where one
# is already.
gpus=$(bash launch/count_gpus.sh)
listed=$(env -u CUDA_VISIBLE_DEVICES bash launch/count_gpus.sh)
if ((listed == 0)) && [[ -n ${CUDA_VISIBLE_DEVICES-0} ]]; then
    gpus=0
    for python in .venv/bin/python ${system_torch:+python3.12 python3.11 python3}; do
        if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
            gpus=1
            break
        fi
    done
fi
((gpus > 0)) || die "no GPU: nvidia-smi lists none that this process may use, nor does torch. A machine with an NVIDIA GPU and its driver was expected; without one, bash launch/test.sh runs the CUDA path on a pretended device"

bash launch/setup.sh "${setup_arguments[@]}"
exec .venv/bin/python -m benchmarks.gpu_check ${options[@]+"${options[@]}"}
