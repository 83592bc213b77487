#!/usr/bin/env bash
# Makes or reuses the pinned environment in .venv (with --floor: the oldest tested versions, in .venv-floor; with --latest:
# the newest, in .venv-latest).
#
#   bash scripts/environment.sh [--floor | --latest]      make it
#   source scripts/environment.sh [--floor | --latest]    make it, then use it in this shell (as test.sh and quickstart.sh do)
#
# 1. Look for Python >= 3.11 with venv and headers and for a C++ compiler (DeepSpeed compiles a small operator);
#    if something is missing, say which `apt-get install` brings it and stop.
# 2. Nothing to do when the stamp in the environment still matches the constraints, pyproject.toml and this file.
# 3. torch first: the CUDA build when there is an NVIDIA GPU, else the CPU build; where the CPU builds' index cannot be
#    reached, what the package index has. Then the rest, then this package.
#
# PYTHON=python3.12 chooses the interpreter, TORCH_INDEX_URL=https://... another index for torch (older CUDA drivers).

_environment() {
    local root venv constraints python stamp gpu=cpu
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    case "${1-}" in
        "") venv="$root/.venv" constraints="$root/constraints/test.txt" ;;
        --floor) venv="$root/.venv-floor" constraints="$root/constraints/floor.txt" ;;
        --latest) venv="$root/.venv-latest" constraints="$root/constraints/latest.txt" ;;
        *) echo "environment.sh: unknown argument $1 (--floor or --latest)" >&2; return 2 ;;
    esac
    nvidia-smi -L 2>/dev/null | grep -q GPU && gpu=cuda

    python="$(_find_python)" || return 1
    stamp="$(cat "$constraints" "$root/pyproject.toml" "${BASH_SOURCE[0]}" <(echo "$gpu $python ${TORCH_INDEX_URL-}") | sha256sum)"
    if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
        _check_tools "$python" || return 1
        echo "Making ${venv#"$root"/} with the versions in ${constraints#"$root"/} (some minutes the first time)"
        rm -f "$venv/.stamp"
        "$python" -m venv --clear "$venv" || return 1
        local pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check)
        "${pip[@]}" --upgrade "pip>=24" || return 1
        _install_torch || return 1
        echo "Installing accelerate, transformers, trl, deepspeed ..."
        _install_rest || return 1
        _check_torch || return 1
        echo "$stamp" >"$venv/.stamp"
    fi
    # Two DeepSpeed versions must not share a cache of compiled operators.
    export TORCH_EXTENSIONS_DIR="$venv/torch_extensions"
    # Whoever was killed while it loaded one leaves a lock behind, on which all others would wait. Compiling takes a minute.
    find "$TORCH_EXTENSIONS_DIR" -name lock -mmin +3 -delete 2>/dev/null || true
    [ "$gpu" = cuda ] || export DS_ACCELERATOR=cpu # or DeepSpeed warns in every process that it found nothing better
    source "$venv/bin/activate"
}

_find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "hf_ulysses needs Python >= 3.11 (looked for: ${PYTHON:-python3 python3.13 python3.12 python3.11})." >&2
    echo "    sudo apt-get install python3.11 python3.11-venv python3.11-dev" >&2
    return 1
}

_check_tools() {
    local python="$1" version missing=()
    # Debian names its packages python3-venv for the system's Python and python3.12-venv for any other.
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    [ "$(readlink -f "$(command -v python3)")" = "$(readlink -f "$python")" ] && version=3
    "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=("python$version-venv")
    "$python" -c 'import os, sysconfig as s, sys; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
        missing+=("python$version-dev")
    command -v c++ >/dev/null || command -v g++ >/dev/null || missing+=("g++")
    if [ ${#missing[@]} -gt 0 ]; then
        echo "Missing on this machine: ${missing[*]}" >&2
        echo "    sudo apt-get install ${missing[*]}" >&2
        return 1
    fi
}

# The default index serves the CUDA build for x86-64 Linux. pip can resolve without downloading (--dry-run --report), so
# we see what the configured index would bring before taking it. torch's own dependencies come with the next step.
_install_torch() {
    local torch cpu=https://download.pytorch.org/whl/cpu
    torch="$(grep '^torch==' "$constraints")"
    if [ -n "${TORCH_INDEX_URL-}" ]; then
        _torch_from --index-url "$TORCH_INDEX_URL" && return
        echo "Could not install $torch from TORCH_INDEX_URL=$TORCH_INDEX_URL." >&2
        return 1
    fi
    if [ "$gpu" = cpu ] && [ "$(_needs_cuda)" = yes ]; then
        [ "$(_needs_cuda --index-url "$cpu")" = no ] && _torch_from --index-url "$cpu" && return
        echo "No CPU build of $torch at $cpu (not reachable?): taking the CUDA build, about 5 GB on disk" >&2
        echo "that a machine without a GPU does not need. TORCH_INDEX_URL=... names a mirror of the CPU builds." >&2
    fi
    _torch_from && return
    echo "Could not install $torch. Where the package index is not reachable, set TORCH_INDEX_URL to a mirror." >&2
    return 1
}

_torch_from() {
    echo "Installing $torch for $gpu${2+ from $2} ..."
    "${pip[@]}" --no-deps --retries 1 --timeout 15 "$@" "$torch"
}

# The newest versions are installed as listed: pip would refuse a release whose requirement the index does not serve yet.
_install_rest() {
    if [ "${constraints##*/}" != latest.txt ]; then
        "${pip[@]}" -c "$constraints" -e "$root[deepspeed,trl,test]" || return 1
        [ "${constraints##*/}" = floor.txt ] || [ "$gpu" = cuda ] || _install_kernels
        return
    fi
    "${pip[@]}" -c "$constraints" "$(grep '^torch==' "$constraints")" &&
        "${pip[@]}" --no-deps -r <(grep -v '^torch==' "$constraints") &&
        "${pip[@]}" --no-deps -e "$root"
}

# What tests/kernels runs on a CPU: Liger's kernels in Triton's interpreter, and the Python part of flash-attn. Not where
# there is a GPU, whose torch has a Triton of its own, and where flash-attn without its compiled part would break training.
_install_kernels() {
    "${pip[@]}" --no-deps wheel==0.48.0 triton==3.9.0 liger-kernel==0.8.5 &&
        FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "${pip[@]}" --no-deps \
            --no-build-isolation --no-binary flash-attn flash-attn==2.8.3
}

# yes, no, or nothing where pip finds none.
_needs_cuda() {
    "${pip[@]}" --retries 1 --timeout 15 "$@" --dry-run --no-deps --ignore-installed --report - "$torch" 2>/dev/null |
        "$venv/bin/python" -c '
import json, re, sys
needs = json.loads(sys.stdin.read() or "null")
if needs:
    needs = needs["install"][0]["metadata"].get("requires_dist", [])
    print("yes" if any(re.match("(cuda|nvidia)-", need) for need in needs) else "no")'
}

_check_torch() {
    [ "$gpu" = cpu ] || "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && return
    echo "nvidia-smi shows a GPU, but the installed torch cannot use it: the driver is older than torch's CUDA." >&2
    echo "Update the driver or choose another build, e.g. TORCH_INDEX_URL=https://download.pytorch.org/whl/cu126" >&2
    return 1
}

_environment "$@"
