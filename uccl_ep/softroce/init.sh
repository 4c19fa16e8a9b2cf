#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
#
# The guest's first program: modules, the machine's files read-only below a layer in memory, then /out/command. On the
# second serial line it says "ready" before that; the command may write there, too. The exit status is left in /out/rc,
# for nobody else: how QEMU ends says nothing.
B=/bin/busybox
exec >/dev/console 2>&1
$B mount -t proc p /proc
$B mount -t sysfs s /sys
$B mount -t devtmpfs d /dev
while read -r m; do $B insmod "/m/$m"; done </order
# Started by itself it sometimes meets the kernel patching its own text under several emulating threads.
c=/sys/devices/system/cpu/cpu1/online
[ -e $c ] && echo 1 >$c
o=trans=virtio,version=9p2000.L,msize=512000
$B mount -t 9p -o ro,$o,cache=loose rootfs /lower
$B mount -t tmpfs t /upper
$B mkdir /upper/u /upper/w
$B mount -t overlay -o lowerdir=/lower,upperdir=/upper/u,workdir=/upper/w o /root
for d in proc sys dev; do $B mount --move /$d /root/$d; done
cd /root || exit 1
$B mkdir -p dev/pts dev/shm out run tmp
$B mount -t devpts p dev/pts
$B mount -t tmpfs t dev/shm
$B mount -t tmpfs t run
$B mount -t 9p -o $o,cache=none out out
$B ip link set lo up
for l in fd: stdin:/0 stdout:/1 stderr:/2; do $B ln -sf "/proc/self/fd${l#*:}" "dev/${l%%:*}"; done
$B stty -F dev/ttyS1 raw -echo
echo ready >dev/ttyS1
$B chroot /root /bin/sh /out/command >out/stdout 2>out/stderr <dev/null
echo $? >out/rc.part
$B mv out/rc.part out/rc
$B sync
# To QEMU's isa-debug-exit, sooner than by ACPI.
$B printf '\001' | $B dd of=dev/port bs=1 seek=244 2>/dev/null
$B poweroff -f
