#!/usr/bin/env bash
# A container engine for the tests, started by hand beside whatever else the machine runs. Debian, as root.
#
#   eval "$(bash scripts/dev/container_engine.sh up)"    # installs what is missing, starts it, prints DOCKER_HOST
#   bash scripts/dev/container_engine.sh down            # stops it and removes everything that it made
#
# It changes nothing in the machine's own network: no bridge, no firewall rules. Sandboxes need neither.
set -euo pipefail
state=${POLAR_ENGINE:-/tmp/polar-trl-engine}
socket=$state/docker.sock

is_up() { curl --silent --fail --max-time 2 --unix-socket "$socket" http://engine/_ping > /dev/null 2>&1; }

install_packages() {
  local missing=()
  command -v dockerd > /dev/null || missing+=(docker.io)
  command -v podman > /dev/null || missing+=(podman catatonit)  # for its own tests
  command -v bwrap > /dev/null || missing+=(bubblewrap)
  command -v mkfs.ext4 > /dev/null || missing+=(e2fsprogs)
  command -v nsenter > /dev/null || missing+=(util-linux)
  command -v ip > /dev/null || missing+=(iproute2)  # with the next one, for scripts/machines
  command -v ps > /dev/null || missing+=(procps)
  if [ "${#missing[@]}" -gt 0 ]; then
    echo "container_engine: installing ${missing[*]} ..." >&2
    apt-get update -qq > /dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null 2>&1
  fi
}

up() {
  install_packages
  if ! is_up; then
    mkdir -p "$state"
    echo '{}' > "$state/daemon.json"
    # a session of its own and no inherited files: a lock that the caller holds must not stay with the daemon
    setsid bash -c 'for fd in {3..19}; do eval "exec $fd>&-"; done; exec "$@"' start dockerd --config-file "$state/daemon.json" --host "unix://$socket" \
      --data-root "$state/data" --exec-root "$state/exec" --pidfile "$state/dockerd.pid" \
      --bridge none --iptables=false --ip-forward=false --ip-masq=false \
      --log-driver json-file --log-opt max-size=8m --log-opt max-file=1 \
      > "$state/dockerd.log" 2>&1 < /dev/null &
    for _ in $(seq 300); do is_up && break; sleep 0.1; done
    is_up || { tail -30 "$state/dockerd.log" >&2; echo "container_engine: dockerd did not start" >&2; exit 1; }
  fi
  echo "export DOCKER_HOST=unix://$socket"
}

down() {
  if is_up; then
    docker --host "unix://$socket" ps --all --quiet | xargs -r docker --host "unix://$socket" rm --force --volumes > /dev/null
  fi
  if [ -f "$state/dockerd.pid" ]; then
    kill "$(cat "$state/dockerd.pid")" 2> /dev/null || true
    for _ in $(seq 200); do [ -e "$state/dockerd.pid" ] || break; sleep 0.1; done
  fi
  findmnt --raw --noheadings --output TARGET | { grep "^$state/" || true; } | sort --reverse | xargs -r umount --lazy
  rm -rf "$state"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
