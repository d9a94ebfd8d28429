#!/usr/bin/env bash
# Fills build/wheelhouse/SERVICE, from which an image is built without any network: the wheels of the service's lock (checked by
# their hashes here), torch's where it needs torch, and the project's own. wheelhouse.sh PIP
# torch is of the kind that pip finds: its CPU build says so in its name, the other one brings CUDA's libraries along.
set -euo pipefail
pip=${1:?the pip to use}
out=build/wheelhouse
case $("$pip" --version) in
*"(python 3.11)"*) ;;
*) echo "the images hold Python 3.11, so their wheels must be made by one: make setup PYTHON=python3.11" >&2; exit 1 ;;
esac

fresh() { # FOLDER LOCK…: whether FOLDER has to be filled again; it is emptied then
  local sum
  sum=$(cat "${@:2}" | sha256sum)
  [ "$(cat "$1/.filled" 2>/dev/null)" = "$sum" ] && return 1
  rm -rf "$1" && mkdir -p "$1" && echo "$sum" >"$1.filled"
}
filled() { mv "$1.filled" "$1/.filled"; }

if fresh "$out/torch" requirements/torch.txt; then
  "$pip" download --quiet --quiet --no-deps --dest "$out/torch" -r requirements/torch.txt
  filled "$out/torch"
fi
own=()
compgen -G "$out/torch/*+cpu*" >/dev/null || own=(requirements/cuda.txt)
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
