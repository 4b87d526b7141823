#!/usr/bin/env bash
# Builds the image of deploy/docker/Dockerfile, starts it, asks it for a completion, and ends it (make test-images).
# Needs root, buildah and mmdebstrap, but no registry: the base is Debian with its own Python instead of the official
# Python image. The build uses the pip settings of this host. Takes minutes and 5 GB in build/images.
set -euo pipefail
cd "$(dirname "$0")/../.."
port=${PORT:-8155}
folder=build/images
mkdir -p $folder
rm -f $folder/pid # of an earlier run: another process may have it now
buildah() { command buildah --root "$PWD/$folder/store" --runroot "$PWD/$folder/run" "$@"; }

if ! buildah inspect --type image localhost/python >/dev/null 2>&1; then
  mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
    --customize-hook='ln -s python3 "$1/usr/bin/python"' bookworm $folder/base.tar
  base=$(buildah from scratch)
  buildah add --quiet "$base" $folder/base.tar / >/dev/null
  buildah commit --quiet --rm "$base" localhost/python >/dev/null
  rm $folder/base.tar
fi

settings=()
share() { if [ -e "$1" ]; then settings+=(--volume "$1:$1:ro"); fi; }
while read -r file; do share "$file"; done < <(python3 -m pip config debug | sed -n 's/^ *\(.*\), exists: True$/\1/p')
# Local indexes with the files beside them, folders of wheels, and certificates that these settings name.
for path in $(python3 -m pip config list | grep -o "/[^' ]*" | sed 's,^//,,; s,/simple$,,' | sort -u); do
  share "$path"
done

buildah build --quiet --format docker --isolation chroot "${settings[@]}" --build-arg PYTHON=localhost/python \
  ${TORCH_INDEX:+--build-arg "TORCH_INDEX=$TORCH_INDEX"} --file deploy/docker/Dockerfile --tag moonserve:cpu .

container=$(buildah from moonserve:cpu)
trap 'if [ -e $folder/pid ]; then kill "$(cat $folder/pid)" 2>/dev/null || true; fi; buildah rm "$container" >/dev/null' EXIT
root=$(buildah mount "$container")
# chroot has no namespace of processes, so the pid is one of this host.
buildah run --isolation chroot "$container" -- \
  sh -c 'id -un; echo $$ >/tmp/pid; exec tini -- moonserve serve --port "$1"' sh "$port" >$folder/serve.log 2>&1 &
for _ in $(seq 300); do
  if curl --silent --fail "http://127.0.0.1:$port/ready" >/dev/null; then break; fi
  kill -0 $! || { cat $folder/serve.log; exit 1; }
  sleep 1
done
cp "$root/tmp/pid" $folder/pid
curl --silent --fail "http://127.0.0.1:$port/v1/completions" --header 'Content-Type: application/json' \
  --data '{"prompt": "def main(", "max_tokens": 8}' | grep --quiet '"completion_tokens":8'
grep --quiet --line-regexp moonserve $folder/serve.log # not root
kill "$(cat $folder/pid)"
rm $folder/pid
wait $! || { echo "it ended with $?"; cat $folder/serve.log; exit 1; }
echo "moonserve:cpu was built, served, and ended when told to"
