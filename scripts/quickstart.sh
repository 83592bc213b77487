#!/usr/bin/env bash
# Makes or reuses the environment, then trains a small Llama on long real documents twice with TRL's SFTTrainer: without
# sequence parallelism, and with it on two GPUs (two CPU processes where there are not two GPUs) under ZeRO-3.
# Shows both curves and fails when they differ by more than 1e-4 relative. Results: outputs/quickstart/.
#
#   bash scripts/quickstart.sh [--steps N]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh ""
exec python scripts/quickstart.py "$@"
