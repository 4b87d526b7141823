# Runs in the chroot: makes the rails (one rxe device per NIC), then runs the job with a clean environment.
# Rail i is eth<i>, address 10.77.<i>.1, device rxe<i>.
set -e
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
# Both NICs are on one wire, and what goes from one rail's address to the other's must take it rather
# than the loopback device: the kernel looks up local addresses first only for what comes in by a NIC,
# accepts its own addresses there, and answers for an address only on its own NIC.
echo 1 >/proc/sys/net/ipv4/conf/all/accept_local
echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
ip link set lo up
for rail in 0 1; do
  ip link set "eth$rail" mtu 4200 up
  ip address add "10.77.$rail.1/24" dev "eth$rail"
done
for rail in 0 1; do rdma link add "rxe$rail" type rxe netdev "eth$rail"; done

mkdir /run/python  # Debian's pyverbs, without the rest of its packages
ln -s /usr/lib/python3/dist-packages/pyverbs /run/python/pyverbs
. /run/job/job.sh
