#!/usr/bin/env bash
# Makes the environments of `make test-clients`, from the pinned lists beside this script. vLLM has
# one of its own: it wants an older Transformers. Ends with an error where anything is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for name in clients clients-vllm; do
  folder=build/$name list=tests/clients/$name.txt
  if ! cmp -s "$list" "$folder/installed.txt"; then
    echo "setting up $folder"
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install -q -r "$list"
    cp "$list" "$folder/installed.txt"
  fi
  # Always: clients find ficco by its entry points.
  "$folder/bin/python" -m pip install -q --no-deps -e .
done
