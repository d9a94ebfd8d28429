#!/usr/bin/env bash
# Fills build/wheelhouse/SERVICE, from which an image is built without any network: the wheels of the service's lock (checked by
# their hashes here), torch's where it needs torch, and the project's own. wheelhouse.sh PIP [cpu|cuda]
set -euo pipefail
pip=${1:?the pip to use}
device=${2:-cpu}
out=build/wheelhouse
case $device in
cpu) own=() ;;
cuda) own=(requirements/cuda.txt) ;;
*) echo "DEVICE is '$device': must be cpu or cuda" >&2; exit 1 ;;
esac

fresh() { # FOLDER LOCK…: whether FOLDER has to be filled again; it is emptied then
  local sum
  sum=$(cat "${@:2}" | sha256sum)
  [ "$(cat "$1/.filled" 2>/dev/null)" = "$device $sum" ] && return 1
  rm -rf "$1" && mkdir -p "$1" && echo "$device $sum" >"$1.filled"
}
filled() { mv "$1.filled" "$1/.filled"; }

if fresh "$out/torch" requirements/torch.txt; then
  "$pip" download --quiet --quiet --no-deps --dest "$out/torch" -r requirements/torch.txt
  filled "$out/torch"
fi
for service in controller reward rollout trainer; do
  locks=("requirements/$service.txt")
  case $service in rollout | trainer) locks+=("${own[@]}") ;; esac
  if fresh "$out/$service/wheels" "${locks[@]}"; then
    for lock in "${locks[@]}"; do
      "$pip" wheel --quiet --quiet --no-deps --require-hashes --wheel-dir "$out/$service/wheels" -r "$lock"
    done
    filled "$out/$service/wheels"
  fi
  case $service in rollout | trainer) rm -rf "$out/$service/torch" && cp -al "$out/torch" "$out/$service/torch" ;; esac
done
rm -rf "$out/project" && mkdir "$out/project"
"$pip" wheel --quiet --quiet --no-deps --no-build-isolation --wheel-dir "$out/project" .
for service in controller reward rollout trainer; do
  rm -rf "$out/$service/project" && cp -al "$out/project" "$out/$service/project"
done
