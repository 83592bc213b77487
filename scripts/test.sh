#!/usr/bin/env bash
# Makes or reuses the environment and runs the tests.
#
#   bash scripts/test.sh [--all | --quick] [--floor | --latest] [pytest arguments]
#
#   --all      the full product of engines, sizes and accumulation instead of its pairwise cover
#   --quick    for who changes a line: the unit tests, the exchange, attention and the loss on ranks, and a run under
#              ZeRO-3 and FSDP2; under 2 minutes
#   --floor    the tests marked `versions`, on the oldest supported versions (.venv-floor)
#   --latest   the same tests on the newest tested versions (.venv-latest)
#
# Examples: `bash scripts/test.sh -k exchange`, `bash scripts/test.sh tests/unit`.
# With CI=true: the ordinary tests, then the marked ones on the oldest and on the newest versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Paths and not a mark: pytest says so when one of them is gone.
TRAJECTORY="tests/training/test_trajectories.py::test_the_trajectory_of_one_process"
QUICK=(
    tests/unit
    tests/distributed/test_exchange.py
    tests/distributed/test_attention.py
    tests/distributed/test_loss.py
    "${TRAJECTORY}[zero3-2-1-1-trainer]"
    "${TRAJECTORY}[fsdp2-2-1-1-sft]"
)

versions="" arguments=()
for argument in "$@"; do
    case "$argument" in
        --all) export HF_ULYSSES_TEST_ALL=1 ;;
        --quick) arguments+=("${QUICK[@]}") ;;
        --floor | --latest) versions="$argument" ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit ;;
        *) arguments+=("$argument") ;;
    esac
done

run_tests() { # --floor, --latest or "", pytest arguments
    (
        source scripts/environment.sh "$1"
        # One thread per rank: the ranks of a test share the cores.
        export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
        # transformers 5.25 takes kernels from the hub in every from_pretrained, and fails where it may not.
        export USE_HUB_KERNELS=NO
        [ -z "$1" ] || set -- "$@" -m versions
        python -m pytest -x -q --durations=10 "${@:2}"
    )
}

run_tests "$versions" "${arguments[@]}"
if [ "${CI-}" = true ] && [ -z "$versions" ]; then
    echo "Again on the oldest supported versions: the tests marked versions"
    run_tests --floor
    echo "Again on the newest tested versions"
    run_tests --latest
fi
