#!/usr/bin/env bash
# From a fresh machine to a model that got better inside an agent: two CPU cores, no GPU, no container, no model hub.
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh --seed 7 --steps 12
#
# Options: --seed N (default 42), --steps N (default 20); anything else goes to polar-trl train.
# Installs into .venv, keeps the model in .cache, writes the run to runs/quickstart-seed<N>-<time> or --output_dir.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "quickstart: $1" >&2; exit 2; }

seed=42 steps=20 run='' resumes='' sandbox='' rest=()
while [ $# -gt 0 ]; do
  name=${1%%=*}
  if [ "$name" = "$1" ]; then value=${2:-} taken=2; else value=${1#*=} taken=1; fi
  case ${name//-/_} in  # polar-trl train takes hyphens for underscores too
    __seed|__steps|__max_steps)
      [[ $value =~ ^[0-9]+$ ]] || fail "$name takes a number"
      [ "$name" = --seed ] && seed=$value || steps=$value
      shift "$taken" ;;
    __output_dir)
      [ -n "$value" ] || fail "$name takes a folder"
      run=$value
      shift "$taken" ;;
    __help|_h) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    __resume_from_checkpoint) resumes=yes; rest+=("$1"); shift ;;
    __sandbox) sandbox=given; rest+=("$1"); shift ;;
    *) rest+=("$1"); shift ;;
  esac
done
[ -z "$resumes" ] || [ -n "$run" ] ||
  fail "every start makes a folder of its own; add --output_dir, the folder of the run to go on with"
run=${run:-runs/quickstart-seed$seed-$(date +%Y%m%d-%H%M%S)}

bash scripts/install.sh
bin=${VENV:-.venv}/bin
# Where the default sandbox does not work: the agent of this run is small, and local sandboxes say what they do not hold.
trial='from polar_trl.sandbox import build_backend; build_backend("auto")'
if [ -z "$sandbox" ] && ! why=$("$bin/python" -c "$trial" 2>&1); then
  echo "quickstart: ${why##*Error: }; going on with it" >&2
  rest+=(--sandbox local)
fi
# glibc gives large blocks back to the kernel and asks for them again on every pass; keeping them saves time.
export MALLOC_MMAP_THRESHOLD_=4294967295 MALLOC_TRIM_THRESHOLD_=17179869184
# One process needs no launcher; that of accelerate would answer Ctrl-C with a traceback and not wait for the run.
export ACCELERATE_USE_CPU=true OMP_NUM_THREADS="$(nproc)"
echo "quickstart: $steps steps into $run; a step takes about 12 seconds on two cores, an evaluation 20" >&2
"$bin/polar-trl" train quickstart --seed "$seed" --max_steps "$steps" \
  --output_dir "$run" ${rest[@]+"${rest[@]}"}
echo "try it:     $bin/polar-trl serve $run --config quickstart, and put an agent in front of it: docs/serve.md"
echo "next: bash scripts/quickstart.sh --seed $((seed + 1)) --temperature 1.0, or your own agent: docs/own-agent.md"
