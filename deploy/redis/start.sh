#!/bin/sh
# Redis that loses nothing: never evicts, keeps an append-only file, and repairs the end of that file before it starts.
# (Redis itself cuts a torn transaction in the middle; its checker cuts before it.)
set -eu
for log in /data/appendonlydir/appendonly.aof.manifest /data/appendonly.aof; do
  if [ -s "$log" ]; then # an empty one needs no repair
    yes | redis-check-aof --fix "$log"
    break
  fi
done
set -- redis-server --dir /data --bind "* -::*" --protected-mode no --appendonly yes --appendfsync everysec \
  --aof-load-truncated no --save "" --maxmemory-policy noeviction --maxmemory "${REDIS_MAXMEMORY:-4gb}"
if [ "$(id -u)" = 0 ] && command -v docker-entrypoint.sh >/dev/null; then
  exec docker-entrypoint.sh "$@" # the public image's: gives the files to its user, and becomes it
fi
exec "$@"
