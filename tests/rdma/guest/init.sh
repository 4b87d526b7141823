#!/bin/busybox sh
# The guest's first process: load the modules, put a writable layer over the host's root, make the
# rails, run the job in a chroot, leave its exit code in the results folder, and reset (QEMU then ends).
busybox mount -t proc proc /proc  # from here on the shell finds its own applets (/proc/self/exe)
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
echo >/proc/sys/kernel/modprobe  # a request for a module must fail at once, not run the host's modprobe

while read -r module; do insmod "/modules/$module"; done </modules/order

# 9p over virtio takes at most 128 pages less two per message; cache=loose because nobody changes the host's tree meanwhile.
root_options=trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro,noatime
mount -t 9p -o "$root_options" root /host || echo "guest: no host root"
mount -t tmpfs -o size=50% layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work overlay /root
mount -t proc proc /root/proc
mount -t sysfs sys /root/sys
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/shm /root/dev/pts
mount -t tmpfs shm /root/dev/shm
mount -t devpts devpts /root/dev/pts
mount -t tmpfs run /root/run
mkdir -p /root/run/job /root/run/cache /root/run/tmp  # not /tmp: the repository may lie there
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none job /root/run/job
# What jobs compile is kept for the next guest, as a home's cache folder would.
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose cache /root/run/cache

mkfifo /said
dd bs=4k if=/said of="$(echo /dev/vport*p1)" 2>/dev/kmsg &
speaker=$!
chroot /root /bin/sh /run/job/start.sh >/said 2>&1 </dev/null
echo $? >/root/run/job/exit_code

tries=0  # what the job left running may hold the pipe open: give the last words two seconds
while kill -0 $speaker 2>/dev/null && [ $tries -lt 20 ]; do usleep 100000; tries=$((tries + 1)); done
sync
reboot -f
