#!/usr/bin/env bash
# Run Python of this checkout on a machine that has control groups of version 2 only: Debian's user-mode Linux, which is
# an ordinary process here, with this machine's files. Needs Debian on x86_64, root and bubblewrap; takes minutes.
#
#   bash scripts/dev/on_cgroup_v2.sh -m polar_trl.cli doctor --security --sandbox bwrap
#   CONTAINER=yes bash scripts/dev/on_cgroup_v2.sh ...     as in a container: a group and a namespace of its own
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d /tmp/polar-uml.XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
(cd "$work" && apt-get download user-mode-linux && dpkg -x user-mode-linux_*.deb .) > /dev/null 2>&1
modules=$(find "$work/usr/lib/uml" -name loop.ko -o -name overlay.ko | tr '\n' ' ')
mkdir "$work/tmp"
cat > "$work/insmod.py" <<'PYTHON'
import ctypes, sys
for path in sys.argv[1:]:
    content = open(path, "rb").read()
    assert ctypes.CDLL(None).init_module(content, len(content), b"") == 0, path
PYTHON
run="cd $PWD && $(printf '%q ' "$PWD/.venv/bin/python" "$@")"
if [ "${CONTAINER:-no}" = yes ]; then
  inner="umount /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && cat /proc/self/cgroup && $run"
  run="echo +memory +cpu +pids > /sys/fs/cgroup/cgroup.subtree_control; mkdir /sys/fs/cgroup/container
echo \$\$ > /sys/fs/cgroup/container/cgroup.procs; unshare --cgroup --mount sh -c $(printf '%q' "$inner")"
fi
cat > "$work/init" <<SHELL
#!/bin/sh
export PATH=$PATH HOME=/root TMPDIR=$work/tmp PYTHONPATH=$PWD OMP_NUM_THREADS=1
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /dev/shm; for place in /run /dev/shm $work/tmp; do mount -t tmpfs tmp \$place; done
$PWD/.venv/bin/python $work/insmod.py $modules
ip link set lo up
echo "controllers: \$(cat /sys/fs/cgroup/cgroup.controllers)"
$run
echo "exit status: \$?"
poweroff -f
SHELL
chmod +x "$work/init"
"$work/usr/bin/linux.uml" mem=2G quiet root=/dev/root rootfstype=hostfs rootflags=/ rw init="$work/init" \
  con=null con0=fd:0,fd:1 < /dev/null 2> /dev/null | tee "$work/output"
grep -q "^exit status: 0" "$work/output"
