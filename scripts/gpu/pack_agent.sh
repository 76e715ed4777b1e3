#!/usr/bin/env bash
# Pack an installed Pi and its Node into one small archive, for a machine without npm and without a network.
#
#   bash scripts/gpu/pack_agent.sh OUT.tar.xz          here, after `polar-trl doctor pi --install`
#   mkdir -p CACHE && tar -xJf OUT.tar.xz -C CACHE     there; then POLAR_TRL_CACHE=CACHE
#
# Packed is what `pi -p` opens: Node's program without debug symbols, Pi's bundle, its themes. Left out are Pi's
# unbundled modules, documentation, types and maps. Refuses to pack what does not start from an empty cache.
set -euo pipefail
out=$(realpath "${1:?which archive to write}")
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
read -r node pi < <("$PYTHON" -c 'from polar_trl.harness.pi import PiHarness; print(*PiHarness().folders)')
for folder in "$node" "$pi"; do
  [ -e "$folder/.installed" ] || { echo "pack_agent.sh: $folder is not installed; polar-trl doctor pi --install" >&2; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cache=$work/cache
package=node_modules/@earendil-works/pi-coding-agent

to=$cache/agents/$(basename "$node")
mkdir -p "$to/node_modules/node/bin" "$to/node_modules/.bin"
cp "$node/node_modules/node/package.json" "$to/node_modules/node/"
strip -o "$to/node_modules/node/bin/node" "$node/node_modules/node/bin/node"
ln -s ../node/bin/node "$to/node_modules/.bin/node"
touch "$to/.installed"

to=$cache/agents/$(basename "$pi")
mkdir -p "$to/$package/dist" "$to/node_modules/.bin"
cp "$pi/$package/package.json" "$to/$package/"
(cd "$pi/$package" && find dist/bundle dist/modes -type f ! -name '*.map' ! -name '*.d.ts' \
  \( -path 'dist/bundle/*' -o -name '*.json' \) -print0 | tar -c --null -T -) | tar -x -C "$to/$package"
ln -s ../@earendil-works/pi-coding-agent/dist/bundle/cli.js "$to/node_modules/.bin/pi"
touch "$to/.installed"

# an empty HOME and no other node: the packed pair must start alone
found=$(cd "$work" && env -i HOME="$work" PATH="$cache/agents/$(basename "$node")/node_modules/.bin:/usr/bin:/bin" \
  "$to/node_modules/.bin/pi" --version)
echo "packed Pi says: $found"
mkdir -p "$(dirname "$out")"
tar --sort=name --owner=0 --group=0 --mtime=@0 -cf - -C "$cache" agents | xz --lzma2=preset=9e,dict=64MiB -T1 >"$out"
ls -l "$out"
