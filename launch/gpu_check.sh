#!/usr/bin/env bash
# Measure Mixtrain on this machine's GPU within the given seconds, the most valuable results first.
began=$EPOCHSECONDS # the set-up counts
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash launch/gpu_check.sh [--seconds 540] [--system-torch | --image] [--wheels DIR] [OPTION]...

On a machine with an NVIDIA GPU: makes .venv if necessary, then runs a list of measurements, called rungs: tests marked
gpu, dense and MoE training compared with other frameworks, kernels and gaps between them, state on the host, generation,
the longest context. Each result is written at once to benchmarks/results/card.jsonl. The command stops when its time is
up, and the next call continues with the remaining rungs.

  --seconds N     time for everything, from the start of this command
  --system-torch  use the torch of this machine's Python instead of installing one
  --image         use the packages of this machine's Python in the versions there, and missing ones from --wheels; saves
                  the minute that making .venv takes
  --wheels DIR    set up from this folder of wheels, without a network; launch/wheels.sh fills one
  --results DIR   write card.jsonl to this folder
  --commit HASH   record this commit in the results, if the tree is a copy without git
  --only WORD     run only rungs whose name contains this word; may be repeated
  --list          print the rungs with their cost and state, and measure nothing
  --small         use tiny sizes; also works without a GPU

The exit status is 0 if every rung of this call succeeded, 1 if one failed, 2 if nothing was started because the
options, the machine or the results are wrong, and 130 after Ctrl-C.
TEXT
}

die() {
    echo "gpu_check: $*" >&2
    exit 2
}

root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
setup_arguments=(--extra dev)
system_torch=
image=
wheels=
needs_gpu=1
options=()
only=()
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
        --image)
            image=1
            system_torch=1
            shift
            ;;
        --wheels)
            [[ -d ${2:-} ]] || die "--wheels needs a folder that exists, not '${2:-}'; fill one on a machine with a network: bash launch/wheels.sh DIR"
            wheels=$(realpath -- "$2")
            setup_arguments+=("$1" "$wheels")
            shift 2
            ;;
        --results)
            [[ -n ${2:-} && $2 != -* ]] || die "--results needs a folder, not '${2:-}'"
            options+=("$1" "$(realpath -m -- "$2")")
            shift 2
            ;;
        --seconds)
            [[ ${2:-} =~ ^[1-9][0-9]{0,5}$ ]] || die "--seconds=${2:-} must be a whole number from 1 to 999999, such as 540"
            options+=("$1" "$2")
            shift 2
            ;;
        --minutes)
            die "--minutes was replaced by --seconds, such as --seconds 540"
            ;;
        --commit)
            [[ ${2:-} =~ ^[0-9A-Za-z][0-9A-Za-z._+/-]*$ ]] || die "--commit needs the commit that this tree is a copy of, such as 1a2b3c4, not '${2:-}'"
            options+=("$1" "$2")
            shift 2
            ;;
        --only)
            [[ -n ${2:-} && $2 != -* ]] || die "--only needs a word of a rung's name, not '${2:-}'; --list prints the names"
            only+=("$2")
            shift 2
            ;;
        --small | --list)
            needs_gpu=
            options+=("$1")
            shift
            ;;
        *)
            die "unknown option $1; see bash launch/gpu_check.sh --help"
            ;;
    esac
done
cd "$root"

# Before the set-up, which takes minutes. A container may have a GPU without nvidia-smi: then an installed torch is asked.
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
((gpus > 0)) || [[ -z $needs_gpu ]] || die "no GPU: neither nvidia-smi nor torch lists one that this process may use. This command needs an NVIDIA GPU and its driver; without one, --small runs everything in tiny sizes, and bash launch/test.sh runs the CUDA path on a fake CUDA device"

python=.venv/bin/python
if [[ -n $image ]]; then
    python=
    for candidate in python3.12 python3.11 python3; do
        if "$candidate" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    [[ -n $python ]] || die "--image: no Python 3 on PATH has torch; leave the option out to install torch"
    added=$root/.image-packages
    export PYTHONPATH=$added:$root${PYTHONPATH:+:$PYTHONPATH}
    mapfile -t missing < <([[ -z $wheels ]] || "$python" launch/missing_wheels.py "$wheels")
    if ((${#missing[@]} > 0)); then
        "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --target "$added" "${missing[@]}"
    fi
else
    bash launch/setup.sh "${setup_arguments[@]}" || exit 2
fi
exec "$python" -m benchmarks.card --since "$began" ${options[@]+"${options[@]}"} ${only[@]+--only "${only[@]}"}
