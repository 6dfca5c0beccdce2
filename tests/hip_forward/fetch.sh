#!/usr/bin/env bash
# Downloads hip-python for the Python of another machine to build/hip-python/cp<version>, for machines
# with GPUs and no network: tests/hip_forward/fetch.sh [312]. The wheels support this version and later.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${1:-312}
folder=build/hip-python/cp$python
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
platforms=()
for tag in manylinux_2_28 manylinux_2_17 manylinux2014; do platforms+=(--platform "${tag}_x86_64"); done
version=10.0.0.0.1.2
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: -d "$wheels" \
  --implementation cp --python-version "${python:0:1}.${python:1}" "${platforms[@]}" \
  "hip-python==$version" "rocm-bindings-core==$version" "rocm-bindings-hip==$version"
mkdir -p "$folder"
for wheel in "$wheels"/*.whl; do "${PYTHON:-python3}" -m zipfile -e "$wheel" "$folder"; done
echo "$folder: $(du -sh "$folder" | cut -f1)"
