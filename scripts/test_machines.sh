#!/usr/bin/env bash
# Run on several machines that are made of Linux namespaces: own networks, host names, processes, mounts, /tmp.
#
#   bash scripts/test_machines.sh --json machines.json      all parts
#   bash scripts/test_machines.sh --json machines.json c    one of them
#
# Parts:
#   a   a trainer whose sessions run on two other machines of a Ray cluster, in bubblewrap and in containers
#   b   the same, with one of those machines killed and another one joining
#   c   ranks on two machines: two steps, equal weights, a kill, a resume
#
# Needs Linux and root; installs iproute2 if it is missing. The file has: sessions, per_node (sessions by machine), lost
# (sessions that a machine took with it), left_behind (processes and folders of sessions after the end),
# weights_equal, resumed_equal, each null if no part that was run counts it, and parts, with what each found. Exit
# status 0 if all that was asked for holds.
set -euo pipefail
cd "$(dirname "$0")/.."
help() { sed -n '2,16p' "$0" | sed 's/^# \{0,1\}//'; }
out=
parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --json) out=${2:?--json needs a file}; shift ;;
    --help | -h) help; exit 0 ;;
    a | b | c) parts+=("$1") ;;
    *) echo "test_machines.sh: unknown argument $1" >&2; help >&2; exit 2 ;;
  esac
  shift
done
[ -n "$out" ] || { echo "test_machines.sh: --json FILE is needed" >&2; exit 2; }
[ ${#parts[@]} -gt 0 ] || parts=(a b c)
[ "$(id -u)" = 0 ] || { echo "test_machines.sh: only root can make machines of namespaces" >&2; exit 1; }
if ! command -v ip > /dev/null; then
  { apt-get update && apt-get install -y --no-install-recommends iproute2; } > /dev/null ||
    { echo "test_machines.sh: ip is missing; install iproute2" >&2; exit 1; }
fi
python=${VENV:-.venv}/bin/python
export PYTHONPATH=$PWD
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
failed=0
for part in "${parts[@]}"; do
  case $part in a | b) proof=sessions ;; c) proof=ranks ;; esac
  # a proof makes its machines and removes them; those of one that is killed here end with it
  timeout --kill-after=30 "${LIMIT_S:-1200}" "$python" "scripts/machines/$proof.py" "$part" --json "$results/$part.json" ||
    { echo "test_machines.sh: part $part failed" >&2; failed=1; }
done
"$python" scripts/machines/join_results.py "$results" "$out"
exit $failed
