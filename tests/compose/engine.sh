#!/usr/bin/env bash
# The Docker engine that the tests use: engine.sh start|stop|env|able, or engine.sh during COMMAND…, which starts it, runs the
# command, and stops it again if it was not up before.
# An engine that answers already is taken as it is. Otherwise, as root, a private one is started: its socket, pid file and data
# live in unimesh/docker of the user's cache, so that base images and layers are made once, and what it needs is installed from
# the machine's own Debian packages.
set -euo pipefail
folder=$(realpath -m "${XDG_CACHE_HOME:-$HOME/.cache}/unimesh/docker")
host=unix://$folder/docker.sock
answers() { DOCKER_HOST=$1 timeout 10 docker info >/dev/null 2>&1; }
given() { [ ! -S "$folder/docker.sock" ] && timeout 10 docker info >/dev/null 2>&1; }

own_pid() { # of the private engine, if it runs; a file that outlived its process may name any other
  local pid
  pid=$(cat "$folder/dockerd.pid" 2>/dev/null) || return 1
  tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q -- "--data-root $folder/data" && echo "$pid"
}

tidy() { # what an engine that was killed left: its containerd and shims, their mounts, sockets and pid files
  local file pid mount
  for file in /proc/[0-9]*/cmdline; do
    if tr '\0' ' ' 2>/dev/null <"$file" | grep -q -- "$folder/exec"; then
      pid=${file#/proc/} pid=${pid%/cmdline}
      pkill -KILL -P "$pid" || true # a container's own process
      kill -KILL "$pid" 2>/dev/null || true
    fi
  done
  for mount in $(awk -v at="$folder/" 'index($2, at) == 1 {print $2}' /proc/mounts | sort -r); do umount -l "$mount" || true; done
  rm -rf "$folder/exec" "$folder/dockerd.pid" "$folder/docker.sock"
}

able() { # why a private engine cannot run here, or nothing
  [ "$(id -u)" = 0 ] || { echo "needs root, or a Docker engine that answers"; return; }
  # CAP_SYS_ADMIN is bit 21, CAP_NET_ADMIN bit 12
  local mask=$((16#$(awk '/^CapEff:/ {print $2}' /proc/self/status)))
  (((mask >> 21 & 1) && (mask >> 12 & 1))) || echo "this machine gives no right to make namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN)"
}

install() {
  local wanted=()
  command -v dockerd >/dev/null && command -v docker >/dev/null && command -v iptables >/dev/null || wanted+=(docker.io iptables)
  command -v docker-compose >/dev/null || docker compose version >/dev/null 2>&1 || wanted+=(docker-compose)
  command -v debootstrap >/dev/null || wanted+=(debootstrap)
  [ ${#wanted[@]} = 0 ] && return
  apt-get update -qq >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
}

case ${1:?start, stop, env, able or during} in
during)
  shift
  own_pid >/dev/null || given || trap '"$0" stop' EXIT
  "$0" start
  eval "$("$0" env)"
  "$@" ;;
able) given || able ;;
env) given || echo "export DOCKER_HOST=$host" ;;
start)
  given && exit 0
  why=$(able)
  [ -z "$why" ] || { echo "no Docker engine: $why" >&2; exit 1; }
  install
  mkdir -p "$folder"
  answers "$host" && exit 0
  own_pid >/dev/null || tidy
  nohup setsid dockerd --host "$host" --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/dockerd.pid" \
    --log-level warn >"$folder/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 60); do answers "$host" && exit 0; sleep 0.5; done
  tail -n 5 "$folder/dockerd.log" >&2
  echo "dockerd did not start, see $folder/dockerd.log" >&2
  exit 1 ;;
stop)
  pid=$(own_pid) || exit 0
  kill "$pid"
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || exit 0; sleep 0.2; done
  echo "dockerd $pid has not ended" >&2
  exit 1 ;;
esac
