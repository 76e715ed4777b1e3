#!/usr/bin/env bash
# Run one of the GPU experiments and keep what it measured.
#
#   bash scripts/gpu/run.sh                          lists the experiments
#   bash scripts/gpu/run.sh train_cost               runs one; figures go to runs/gpu/train_cost.json
#   bash scripts/gpu/run.sh throughput --help        what it can be told
#   OUT_DIR=/data PYTHON=python3.12 bash scripts/gpu/run.sh train_cost
#
# Needs a Python that can import torch, vllm, trl and what pyproject.toml lists, however they got there: installed
# (pip install -c constraints/cuda.txt -e '.[cuda,peft]'), or unpacked somewhere on PYTHONPATH. Nothing is downloaded.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ $# -eq 0 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
  sed -n '2,10s/^# \{0,1\}//p' scripts/gpu/run.sh
  echo "experiments:"
  for file in scripts/gpu/*.py; do
    line=$(sed -n '/^"""/{s/^"""//p;q}' "$file")
    grep -q 'add_argument("--out"' "$file" && grep -q "__main__" "$file" && printf '  %-14s %s\n' "$(basename "$file" .py)" "$line"
  done
  exit 0
fi

name=$1; shift
[ -f "scripts/gpu/$name.py" ] || { echo "run.sh: no experiment $name; without arguments, run.sh lists them" >&2; exit 2; }
if [ -z "${PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
export PYTHONPATH="$PWD:$PWD/scripts:$PWD/scripts/gpu:$PWD/scripts/bench:$PWD/scripts/dev${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# the engine lives in this process; its sampler needs FlashInfer only where that is installed
export VLLM_ENABLE_V1_MULTIPROCESSING=0
"$PYTHON" -c 'import flashinfer' 2>/dev/null || export VLLM_USE_FLASHINFER_SAMPLER=0
exec "$PYTHON" "scripts/gpu/$name.py" --out "${OUT_DIR:-runs/gpu}" "$@"
