#!/usr/bin/env bash
# The tests of bubblewrap and Docker sandboxes, with a container engine of their own. Debian, as root.
#
#   bash scripts/test_containers.sh
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
bin=${VENV:-.venv}/bin
trap 'bash scripts/container_engine.sh down' EXIT
eval "$(bash scripts/container_engine.sh up)"
"$bin/python" scripts/make_test_image.py
"$bin/python" -m pytest -m containers "$@"
