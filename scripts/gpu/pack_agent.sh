#!/usr/bin/env bash
# Pack installed agents and their Node into one archive, for a machine without npm and without a network.
#
#   bash scripts/gpu/pack_agent.sh OUT.tar.xz pi codex   here, after `polar-trl doctor pi codex --install`
#   mkdir -p CACHE && tar -xJf OUT.tar.xz -C CACHE       there; then POLAR_TRL_CACHE=CACHE
#
# Left out are maps, types, documentation, and what the agents do not start (Pi's unbundled modules, Codex's voice
# host, Qwen Code's web shell). Sizes: Pi 17 MB with Node's 11, Qwen Code 17 MB, Codex 84 MB, Claude Code 135 MB.
# Refuses to write an archive from which an agent does not start.
set -euo pipefail
out=$(realpath "${1:?which archive to write}")
shift
[ $# -gt 0 ] || { echo "pack_agent.sh: which agents?" >&2; exit 2; }
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cache=$work/agents
mkdir -p "$cache"

list='import sys; from polar_trl.harness import build_agent
for folder in {f for name in sys.argv[1:] for f in build_agent(name).folders}: print(folder)'
"$PYTHON" -c "$list" "$@" | while read -r folder; do
  [ -e "$folder/.installed" ] ||
    { echo "pack_agent.sh: $folder is not installed; polar-trl doctor $* --install" >&2; exit 1; }
  tar -C "$(dirname "$folder")" -cf - --exclude='*.map' --exclude='*.d.ts' --exclude='README*' --exclude=docs \
    --exclude=web-shell --exclude='export-transcript*' --exclude=codex-voice-host --exclude=codex-code-mode-host \
    --exclude='*/pi-coding-agent/node_modules' --exclude='*/pi-coding-agent/dist/core' --exclude=node_modules/npm \
    "$(basename "$folder")" | tar -C "$cache" -xf -
done
chmod -R u+w "$cache"
node=$(find "$cache" -path '*/node_modules/node/bin/node')
[ -z "$node" ] || strip "$node"

# an empty HOME and no other node: what was packed must start alone
for program in "$cache"/*/node_modules/.bin/{pi,codex,claude,qwen}; do
  [ -e "$program" ] || continue
  found=$(cd "$work" && env -i HOME="$work" PATH="${node:+$(dirname "$node"):}/usr/bin:/bin" "$program" --version)
  echo "packed $(basename "$program") says: $found"
done
mkdir -p "$(dirname "$out")"
tar --sort=name --owner=0 --group=0 --mtime=@0 -C "$work" -cf - agents | xz -T0 -6 >"$out"
ls -l "$out"
