#!/bin/sh
# Redis that loses nothing: never evicts, keeps an append-only file, and repairs the end of that file before it starts.
# (Redis itself cuts a torn transaction in the middle; its checker cuts before it.)
set -eu
repair() { # FILE: what holds no byte yet needs none
  [ -s "$1" ] && yes | redis-check-aof --fix "$1"
}
if [ -e /data/appendonlydir/appendonly.aof.manifest ]; then
  repair /data/appendonlydir/appendonly.aof.manifest
elif [ -e /data/appendonly.aof ]; then
  repair /data/appendonly.aof
fi
exec redis-server --dir /data --bind "* -::*" --protected-mode no --appendonly yes --appendfsync everysec \
  --aof-load-truncated no --save "" --maxmemory-policy noeviction --maxmemory "${REDIS_MAXMEMORY:-4gb}"
