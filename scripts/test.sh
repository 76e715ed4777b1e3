#!/usr/bin/env bash
# Install what the tests need, check the code, run the tests. Arguments go to pytest:
#
#   bash scripts/test.sh                 # everything, as CI runs it
#   bash scripts/test.sh tests/wire -x   # a part
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
bin=${VENV:-.venv}/bin
"$bin/python" scripts/get_model.py > /dev/null
"$bin/python" scripts/get_agents.py
bash scripts/check
exec "$bin/python" -m pytest "$@"
