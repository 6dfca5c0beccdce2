#!/usr/bin/env bash
# Creates the environments of `make test-clients`, `test-titan`, `test-vllm`, `test-oldest` and `test-newest`, by name,
# from the pinned lists in this folder. vLLM has a separate environment of 3 GB, since it requires an older Transformers.
# Ends with an error if a package is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# Without compiled files each process of a test compiles its imports: those of vLLM take minutes.
unset PYTHONDONTWRITEBYTECODE
for name in "$@"; do
  folder=build/$name list=tests/environments/$name.txt
  if ! cmp -s "$list" "$folder/installed.txt"; then
    echo "setting up $folder"
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install -q -r "$list"
    # vLLM requires GPU builds of these packages, which a CPU torch cannot load. Text models do not use them.
    "$folder/bin/python" -m pip uninstall -q -y torchaudio torchcodec torchvision
    cp "$list" "$folder/installed.txt"
  fi
  # Also in existing environments: clients discover ficco by its entry points.
  "$folder/bin/python" -m pip install -q --no-deps -e .
done
