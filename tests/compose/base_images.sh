#!/usr/bin/env bash
# Stand-ins for the public base images where no image registry is reached: base_images.sh BASE_TAG REDIS_TAG.
# Debian + Python, and the same + Debian's redis-server, made by debootstrap from the machine's own package sources; once.
set -euo pipefail
base=${1:?tag of the base image}
redis=${2:?tag of the Redis image}
known() { docker image inspect "$1" >/dev/null 2>&1; }
known "$base" && known "$redis" && exit 0
. /etc/os-release
uri=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/*.sources 2>/dev/null || true)
[ -n "$uri" ] || uri=$(awk '$1 == "deb" {print $(NF - 2); exit}' /etc/apt/sources.list)
root=$(mktemp -d)
trap 'rm -rf "$root" "$root.log"' EXIT
layer() {
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  tar -C "$root" -c . | docker import --change 'ENV LANG=C.UTF-8' --change 'CMD ["python3"]' - "$1" >/dev/null
}
quiet() { "$@" >"$root.log" 2>&1 || { tail -n 20 "$root.log" >&2; return 1; }; }
echo "making $base and $redis (once, about a minute)"
quiet debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$VERSION_CODENAME" "$root" "$uri"
layer "$base"
export DEBIAN_FRONTEND=noninteractive
quiet chroot "$root" sh -c 'apt-get update && apt-get install -y --no-install-recommends redis-server'
layer "$redis"
