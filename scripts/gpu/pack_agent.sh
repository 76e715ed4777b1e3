#!/usr/bin/env bash
# Pack installed agents and their Node into one archive, for a machine without npm and without a network.
#
#   bash scripts/gpu/pack_agent.sh OUT.tar.xz pi codex   here, after `polar-trl doctor pi codex --install`
#   mkdir -p CACHE && tar -xJf OUT.tar.xz -C CACHE       there; then POLAR_TRL_CACHE=CACHE
#
# Agents: pi, codex, claude_code, qwen_code. Packed is what they open when they are started without a terminal: Node's
# program without debug symbols, Pi's bundle and themes, Codex without its voice and code-mode hosts, Qwen Code without
# its web shell, transcript pages and image library. Pi is 28 MB with Node, Claude Code 135 MB.
# Refuses to write an archive from which one of them does not start.
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

declare -A programs=(
  [pi]='*/.bin/pi' [codex]='*/vendor/*/bin/codex' [claude_code]='*/.bin/claude' [qwen_code]='*/.bin/qwen')
for agent in "$@"; do
  [ -n "${programs[$agent]:-}" ] || { echo "pack_agent.sh: knows ${!programs[*]}, not $agent" >&2; exit 2; }
done
list='import sys; from polar_trl.harness import build_agent
for folder in {f for name in sys.argv[1:] for f in build_agent(name).folders}: print(folder)'
pi=node_modules/@earendil-works/pi-coding-agent
"$PYTHON" -c "$list" "$@" > "$work/folders"
while read -r folder; do
  [ -e "$folder/.installed" ] ||
    { echo "pack_agent.sh: $folder is not installed; polar-trl doctor $* --install" >&2; exit 1; }
  name=$(basename "$folder") paths=(.)
  case $name in
    node-*) paths=(.installed node_modules/.bin node_modules/node/package.json node_modules/node/bin/node) ;;
    earendil-*) paths=(.installed node_modules/.bin "$pi/package.json" "$pi/dist/bundle" "$pi/dist/modes") ;;
  esac
  mkdir "$cache/$name"
  tar -C "$folder" -cf - --exclude='*.map' --exclude='*.d.ts' --exclude=web-shell --exclude='export-transcript*' \
    --exclude=@img --exclude=codex-voice-host --exclude=codex-code-mode-host "${paths[@]}" | tar -C "$cache/$name" -xf -
done < "$work/folders"
rm "$work/folders"
chmod -R u+w "$cache"
find "$cache" -path '*/node_modules/node/bin/node' -exec strip {} +

# an empty HOME and no other node: what was packed must start alone
for agent in "$@"; do
  program=$(find "$cache" -path "${programs[$agent]}")
  node=$(dirname "$(find "$cache" -path '*/node_modules/node/bin/node' | head -1)")
  found=$(cd "$work" && env -i HOME="$work" PATH="$node:/usr/bin:/bin" "$program" --version)
  echo "packed $agent says: $found"
done
mkdir -p "$(dirname "$out")"
tar --sort=name --owner=0 --group=0 --mtime=@0 -C "$work" -cf - agents | xz -T0 -6 >"$out"
ls -l "$out"
