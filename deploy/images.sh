#!/usr/bin/env bash
# Builds the four images from build/wheelhouse and prints their sizes. BASE_IMAGE and UNIMESH_TAG say from what and under which tag.
set -euo pipefail
cd "$(dirname "$0")/.."
docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0 # the Dockerfiles need no BuildKit
from_env() { # NAME: of the environment, else of .env
  local line
  line=$(grep -s "^$1=" .env | tail -n 1) || true
  echo "${!1:-${line#*=}}"
}
tag=$(from_env UNIMESH_TAG) tag=${tag:-latest}
BASE_IMAGE=$(from_env BASE_IMAGE)
for service in controller reward rollout trainer; do
  docker build --quiet ${BASE_IMAGE:+--build-arg BASE_IMAGE="$BASE_IMAGE"} --tag "unimesh-$service:$tag" \
    --file "deploy/docker/$service.Dockerfile" "build/wheelhouse/$service" >/dev/null 2>build/images.log || { cat build/images.log >&2; exit 1; }
  printf '%-28s %6d MB\n' "unimesh-$service:$tag" \
    $(($(docker image inspect --format '{{.Size}}' "unimesh-$service:$tag") / 1000000))
done
