#!/usr/bin/env bash
# Install what the tests need, Chromium included, check the code, start a container engine, run the tests. Arguments go
# to pytest:
#
#   bash scripts/test.sh                              everything, as CI runs it (Debian, as root)
#   bash scripts/test.sh tests/wire -x                a part
#   bash scripts/test.sh machines [c]                 sessions and ranks on several machines made of namespaces, which
#                                                     takes minutes of CPU time and is not in CI
#   CONTAINERS=no bash scripts/test.sh                without the tests of containers, for machines without root
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
bin=${VENV:-.venv}/bin
"$bin/python" scripts/dev/get_model.py > /dev/null
"$bin/python" scripts/dev/get_gemma.py > /dev/null
"$bin/python" scripts/dev/get_agents.py
"$bin/python" scripts/dev/get_gym.py > /dev/null
if [ "${1:-}" = machines ]; then
  exec bash scripts/test_machines.sh --json "$(mktemp)" "${@:2}"
fi
if [ ! -x /usr/bin/chromium ]; then
  { apt-get update && apt-get install -y --no-install-recommends chromium; } > /dev/null ||
    { echo "test.sh: the tests of polar-trl inspect need /usr/bin/chromium; install it" >&2; exit 1; }
fi
bash scripts/check
workers=(-n 3)  # three files at a time; tests/conftest.py says what stays together
if [ "${CONTAINERS:-yes}" = no ]; then
  exec "$bin/python" -m pytest "${workers[@]}" -m "not containers" "$@"
fi
POLAR_ENGINE=$(mktemp -d /tmp/polar-trl-engine.XXXXXX)
export POLAR_ENGINE
trap 'bash scripts/dev/container_engine.sh down' EXIT
engine=$(bash scripts/dev/container_engine.sh up)
eval "$engine"
"$bin/python" scripts/dev/make_test_image.py
failed=.pytest_cache/v/cache/lastfailed
rm -f "$failed"
status=0
"$bin/python" -m pytest "${workers[@]}" "$@" || status=$?
# Real engines, kills and time limits on busy cores: up to three failures have one more try, alone and in plain sight.
if [ "$status" != 1 ] || [ "$("$bin/python" -c "import json; print(len(json.load(open('$failed'))))")" -gt 3 ]; then
  exit "$status"
fi
echo "test.sh: failed beside other tests, now once more alone: $(cat "$failed")"
"$bin/python" -m pytest --last-failed "$@"
