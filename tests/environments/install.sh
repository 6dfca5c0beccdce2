#!/usr/bin/env bash
# Makes the environments of `make test-clients`, `test-titan`, `test-vllm`, `test-oldest` and `test-newest`, by name,
# from the pinned lists beside this script. vLLM has one of its own: it wants an older Transformers, and takes 3 GB. Ends
# with an error where anything is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# Without compiled files each process of a test would compile what it imports: vLLM's takes minutes.
unset PYTHONDONTWRITEBYTECODE
for name in "$@"; do
  folder=build/$name list=tests/environments/$name.txt
  if ! cmp -s "$list" "$folder/installed.txt"; then
    echo "setting up $folder"
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install -q -r "$list"
    # vLLM asks for builds for GPUs of these, which a torch for CPUs cannot load. Text needs none.
    "$folder/bin/python" -m pip uninstall -q -y torchaudio torchcodec torchvision
    cp "$list" "$folder/installed.txt"
  fi
  # Always: clients find ficco by its entry points.
  "$folder/bin/python" -m pip install -q --no-deps -e .
done
