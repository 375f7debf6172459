#!/usr/bin/env bash
# Fill a folder with the wheels that launch/setup.sh --wheels installs from, on a machine with a network.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash launch/wheels.sh DIR [--python 3.12] [--without-torch | --image]

Downloads the wheels of launch/constraints.txt for Linux on x86-64 into DIR, for a machine without a network:
`bash launch/setup.sh --wheels DIR` installs from there. --python is that machine's Python, 3.11 or 3.12. With
--without-torch neither torch nor CUDA's libraries are included, for --system-torch. With --image the large packages of
images with torch (transformers, numpy, ...) are left out as well, for `bash launch/gpu_check.sh --image`. Needs Python 3
with pip.
TEXT
}

die() {
    echo "wheels.sh: $*" >&2
    exit 2
}

folder=
python_version=3.12
without_torch=
of_images=
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --python)
            [[ ${2:-} =~ ^3\.1[12]$ ]] || die "--python=${2:-} must be 3.11 or 3.12"
            python_version=$2
            shift 2
            ;;
        --without-torch)
            without_torch=1
            shift
            ;;
        --image)
            without_torch=1
            of_images=1
            shift
            ;;
        -*)
            die "unknown option $1; see --help"
            ;;
        *)
            [[ -z $folder ]] || die "give one folder only, not both $folder and $1"
            folder=$1
            shift
            ;;
    esac
done
[[ -n $folder ]] || die "give the folder to fill; see --help"
mkdir -p "$folder"
folder=$(realpath -- "$folder")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
[[ -x $python ]] || python=python3
needed=$(sed -n 's/^\([a-z0-9][^ ]*==[^ ]*\).*/\1/p' launch/constraints.txt)
if [[ -n $without_torch ]]; then
    needed=$(grep -Ev '^(torch==|triton==|nvidia-|cuda-)' <<<"$needed")
fi
if [[ -n $of_images ]]; then
    needed=$(grep -Ev '^(grpcio|hf-xet|mypy|networkx|numpy|pillow|pyarrow|ruff|sympy|tensorboard|transformers|wandb)==' <<<"$needed")
fi
# The only pinned package without a wheel: it is built here, and runs on any platform.
source_only='^antlr4-python3-runtime=='
"$python" -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir "$folder" "$(grep -E "$source_only" <<<"$needed")"
mapfile -t wheels < <(grep -Ev "$source_only" <<<"$needed")
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --python-version "$python_version" \
    "${platforms[@]}" --dest "$folder" "${wheels[@]}"
echo "wheels.sh: ${#wheels[@]} packages and one built here are in $folder"
