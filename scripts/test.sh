#!/usr/bin/env bash
# Makes or reuses the environment and runs the tests.
#
#   bash scripts/test.sh [--all] [--floor] [pytest arguments]
#
#   --all     the full product of engines, sizes and accumulation instead of its pairwise cover
#   --floor   the tests marked `floor`, on the oldest supported versions (.venv-floor)
#
# Examples: `bash scripts/test.sh -k exchange`, `bash scripts/test.sh tests/unit`.
# With CI=true: the ordinary tests, then the floor subset.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

floor="" arguments=()
for argument in "$@"; do
    case "$argument" in
        --all) export HF_ULYSSES_TEST_ALL=1 ;;
        --floor) floor=--floor ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit ;;
        *) arguments+=("$argument") ;;
    esac
done

run_tests() { # --floor or "", pytest arguments
    (
        source scripts/environment.sh "$1"
        # One thread per rank: the ranks of a test share the cores.
        export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
        [ -z "$1" ] || set -- "$@" -m floor
        python -m pytest -x -q --durations=10 "${@:2}"
    )
}

run_tests "$floor" "${arguments[@]}"
if [ "${CI-}" = true ] && [ -z "$floor" ]; then
    echo "Again on the oldest supported versions: the tests marked floor"
    run_tests --floor
fi
