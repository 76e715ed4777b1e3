#!/usr/bin/env bash
# From a fresh machine to a model that got better inside an agent: two CPU cores, no GPU, no container, no model hub.
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh --seed 7 --steps 12
#
# Options: --seed N (default 42), --steps N (default 20); anything else goes to scripts/train.py.
# Installs into .venv, keeps the model in .cache, writes the run to runs/quickstart-seed<N>-<time>.
set -euo pipefail
cd "$(dirname "$0")/.."

seed=42 steps=20 rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --seed|--steps)
      [[ ${2:-} =~ ^[0-9]+$ ]] || { echo "quickstart: $1 takes a number" >&2; exit 2; }
      [ "$1" = --seed ] && seed=$2 || steps=$2
      shift 2 ;;
    -h|--help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) rest+=("$1"); shift ;;
  esac
done

bash scripts/install.sh
bin=${VENV:-.venv}/bin
"$bin/python" scripts/get_model.py > /dev/null
# glibc gives large blocks back to the kernel and asks for them again on every pass; keeping them saves time.
export MALLOC_MMAP_THRESHOLD_=4294967295 MALLOC_TRIM_THRESHOLD_=17179869184
run=runs/quickstart-seed$seed-$(date +%Y%m%d-%H%M%S)
echo "quickstart: $steps steps into $run; a step takes about 12 seconds on two cores" >&2
"$bin/accelerate" launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu \
  --num_cpu_threads_per_process "$(nproc)" \
  scripts/train.py --config configs/quickstart.yaml --seed "$seed" --max_steps "$steps" --output_dir "$run" \
  ${rest[@]+"${rest[@]}"}
echo "next: bash scripts/quickstart.sh --seed $((seed + 1)) --temperature 1.0, or your own agent: docs/own-agent.md"
