#!/usr/bin/env bash
# Make .venv and install Mixtrain's pinned dependencies into it, once.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash launch/setup.sh [PYTHON] [--extra NAME]... [--system-torch] [--wheels DIR] [PIP ARGUMENT]...

Makes .venv in the repository with Python 3.11 or 3.12 and installs the pinned dependencies. Does nothing if they are
installed already. PYTHON is the interpreter to use (default: python3.12, else python3.11, else python3). Extras: dev (lint,
types, tests), eval (inference.evaluate --tasks), cuda (TransformerEngine), peers (benchmarks). Other arguments go to pip
install, as does pip's own configuration. To start over, delete .venv.

  --system-torch  use the torch that PYTHON has, such as an image's own build for its GPUs, instead of installing one
  --wheels DIR    install only from this folder of wheels, without a network; launch/wheels.sh fills it
TEXT
}

die() {
    echo "setup: $*" >&2
    exit 1
}

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
# Records what a complete installation was made from, and where: written last, and removed first by the next one.
stamp=$venv/.setup-complete
# Exists from the first write to the last: an installation that was killed is remade, since pip would trust its remains.
unfinished=$venv/.setup-unfinished

named_python=
if [[ $# -gt 0 && $1 != -* ]]; then
    named_python=$1
    [[ $named_python != */* || $named_python == /* ]] || named_python=$called_from/$named_python
    shift
fi
extras=()
pip_arguments=()
system_torch=
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --extra)
            [[ ${2:-} =~ ^[a-z]+$ ]] || die "--extra needs a name, such as --extra dev"
            # pip would silently skip an extra that it does not know
            known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[tool/s/^\([a-z]*\) = \[.*/\1/p' pyproject.toml)
            grep -qx -- "$2" <<<"$known" || die "--extra $2: there is no such extra; it is one of ${known//$'\n'/, }"
            extras+=("$2")
            shift 2
            ;;
        --system-torch)
            system_torch=1
            shift
            ;;
        --wheels)
            wheels=$(cd "$called_from" && realpath -e -- "${2:-}" 2>/dev/null) || die "--wheels needs a folder that exists, not '${2:-}'; fill one on a machine with a network: bash launch/wheels.sh DIR"
            compgen -G "$wheels/*.whl" >/dev/null || die "--wheels $2: there is no wheel in that folder; fill it on a machine with a network: bash launch/wheels.sh DIR"
            pip_arguments+=(--no-index --find-links "$wheels")
            shift 2
            ;;
        *)
            pip_arguments+=("$1")
            shift
            ;;
    esac
done

fingerprint() {
    echo "$PWD $(cat pyproject.toml launch/constraints.txt | sha256sum | cut -d ' ' -f 1)"
}

# True if the stamp is of these files in this folder and has all the requested extras.
is_complete() {
    [[ -x $venv/bin/python && -f $stamp && ! -e $unfinished ]] || return 1
    local made_from has extra
    { read -r made_from && read -r has; } <"$stamp" || return 1
    [[ $made_from == "$(fingerprint)" ]] || return 1
    for extra in ${extras[@]+"${extras[@]}"}; do
        [[ " $has " == *" $extra "* ]] || return 1
    done
    [[ -z $system_torch ]] || has_system_torch || return 1
    [[ -z $named_python ]] || has_named_python
}

# Whether .venv was made with --system-torch; it keeps that torch when more is installed without the option.
has_system_torch() {
    grep -q '^include-system-site-packages = true' "$venv/pyvenv.cfg" 2>/dev/null
}

has_named_python() {
    [[ $("$venv/bin/python" -V 2>&1) == "$("$named_python" -V 2>&1)" ]]
}

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1
}

# Prints the folder that this Python finds torch in, without importing it; fails where there is none.
torch_of() {
    "$1" -c 'import importlib.util as u, os; print(os.path.dirname(os.path.dirname(u.find_spec("torch").origin)))' 2>/dev/null
}

fits() {
    is_supported "$1" || return 1
    [[ -z $system_torch ]] || torch_of "$1" >/dev/null
}

# Prints the interpreter to make .venv with. A name on PATH proves nothing: version managers leave shims for versions
# that are not enabled, so each candidate is run, and every place on PATH is tried.
find_python() {
    local name candidate without_venv=
    if [[ -n $named_python ]]; then
        is_supported "$named_python" || die "$named_python is not a Python 3.11 or 3.12 that runs; name another one"
        fits "$named_python" || die "$named_python has no torch, which --system-torch takes; name the Python that has it, or leave the option out"
        "$named_python" -c 'import venv, ensurepip' 2>/dev/null || die "$named_python has no venv module (on Debian and Ubuntu: the package python3-venv)"
        echo "$named_python"
        return
    fi
    for name in python3.12 python3.11 python3 python; do
        while read -r candidate; do
            fits "$candidate" || continue
            if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
                echo "$candidate"
                return
            fi
            without_venv=$candidate
        done < <(type -aP "$name")
    done
    [[ -z $without_venv ]] || die "$without_venv has no venv module (on Debian and Ubuntu: the package python3-venv)"
    [[ -z $system_torch ]] || die "no Python 3.11 or 3.12 on PATH has torch, which --system-torch takes; name the one that has it: bash launch/setup.sh /path/to/python3.12 --system-torch"
    die "no Python 3.11 or 3.12 found on PATH; install one, or name it: bash launch/setup.sh /path/to/python3.12"
}

if is_complete; then
    exit 0
fi

# One installation at a time. The lock is on a file that is always there, and ends with this process and its children.
exec 9>>launch/constraints.txt
if ! flock -n 9; then
    echo "setup: another set-up is running in this folder; waiting for it"
    flock -w 3600 9 || die "the other set-up did not end within an hour"
    if is_complete; then
        exit 0
    fi
fi

started=$SECONDS
# Extras that were installed before stay installed.
if [[ -f $stamp ]]; then
    { read -r _ && read -ra old_extras; } <"$stamp" || old_extras=()
    extras+=(${old_extras[@]+"${old_extras[@]}"})
fi
# pip ends with an ordinary error after Ctrl-C; without this the script would assume that pip has cleaned up.
trap 'exit 130' INT TERM HUP
mapfile -t sorted < <(printf '%s\n' ${extras[@]+"${extras[@]}"} | sort -u | sed '/^$/d')
wanted="${sorted[*]}"
base_python=
if [[ -L $venv && -f $stamp && $(head -n 1 "$stamp") != "$PWD "* ]]; then
    base_python=$(find_python)
    echo "setup: making a new .venv, because this one is a link to that of another clone, which is not changed"
    rm "$venv"
fi
rm -f "$stamp"

python=$venv/bin/python
if [[ -e $venv || -L $venv ]]; then
    reason=
    if [[ -e $unfinished ]]; then
        reason="its last installation was interrupted"
    elif ! is_supported "$python" || ! "$python" -m pip --version >/dev/null 2>&1; then
        reason="its Python 3.11 or 3.12 or its pip does not run"
    elif [[ $("$python" -c 'import os, sys; print(os.path.realpath(sys.prefix))') != "$(realpath "$venv")" ]]; then
        reason="it was made in another folder"
    elif [[ -n $named_python ]] && ! has_named_python; then
        reason="it does not use $named_python"
    elif [[ -n $system_torch ]] && ! has_system_torch; then
        reason="it has a torch of its own"
    fi
    if [[ -n $reason ]]; then
        base_python=$(find_python) # before the old .venv is deleted: a wrong name must not cost it
        echo "setup: making a new .venv, because $reason"
        rm -rf "$venv"
    fi
fi
if [[ ! -e $venv ]]; then
    base_python=${base_python:-$(find_python)}
    echo "setup: making .venv with $("$base_python" -V) ($base_python)"
    mkdir "$venv"
    touch "$unfinished"
    "$base_python" -m venv "$venv" ${system_torch:+--system-site-packages} ||
        die "$base_python could not make a virtual environment in $PWD/$venv"
    if [[ -n $system_torch ]] && ! torch_of "$python" >/dev/null; then
        # That Python is in a virtual environment itself, whose packages are not visible in a new one.
        torch_of "$base_python" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/system_torch.pth"
    fi
fi

constraints=launch/constraints.txt
if has_system_torch; then
    constraints=$venv/constraints.txt
    "$python" launch/system_torch.py launch/constraints.txt >"$constraints" || die "the torch of this Python cannot be used (see above)"
fi

touch "$unfinished"
echo "setup: installing the pinned dependencies${wanted:+ with extras: $wanted} (minutes the first time; PyTorch is large)"
if ! "$python" -m pip install -qq --disable-pip-version-check --constraint "$constraints" \
    --editable ".${wanted:+[${wanted// /,}]}" ${pip_arguments[@]+"${pip_arguments[@]}"}; then
    rm -f "$unfinished" # pip failed by itself and left a consistent environment; the next set-up continues from here
    die "pip could not install the dependencies (its message is above); run this again when the cause is fixed"
fi
# So that no training waits for the compilation; if it fails, torch's operations are used.
if [[ -f moe/kernels/__main__.py ]]; then
    "$python" -m moe.kernels || true
fi
printf '%s\n%s\n' "$(fingerprint)" "$wanted" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$unfinished"
echo "setup: done in $((SECONDS - started)) s"
