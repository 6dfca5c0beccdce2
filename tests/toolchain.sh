#!/usr/bin/env bash
# Installs the compilers, libraries and the model checker that `make test` and `make test-slow` want, on
# Debian as root, as CI does. Elsewhere install them by hand; gates whose tools are missing are
# skipped with the reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# clang-19 and lld-19 compile for AMD's GPUs, g++ compiles the doubles. spin proves Plans with models
# that tcc compiles, in a tenth of gcc's time.
packages=()
command -v clang++-19 > /dev/null || packages+=(clang-19)
command -v ld.lld-19 > /dev/null || packages+=(lld-19)
command -v g++ > /dev/null || packages+=(g++)
command -v spin > /dev/null || packages+=(spin)
command -v tcc > /dev/null || packages+=(tcc)
if ((${#packages[@]})); then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
fi

# nvcc and nvrtc compile for NVIDIA's GPUs.
make .venv/.ready
wheels=(cuda-bindings nvidia-cuda-nvrtc)
if ! command -v nvcc > /dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
  wheels+=(nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime)
fi
.venv/bin/python -m pip install -q "${wheels[@]}"

# Triton compiles for AMD's and NVIDIA's GPUs, and interprets on CPUs. Those of PyTorch for GPUs
# bring their own.
.venv/bin/python -c 'import triton' 2> /dev/null || .venv/bin/python -m pip install -q triton==3.6.0

# hip-python of both series that are served, each in a folder of its own: they share names. They
# come without ROCm, whose library tests/hip_double stands for.
for version in 7.2.2.562.43 10.0.0.0.1.2; do
  folder=build/hip-python/${version%%.*}
  [ -d "$folder/hip" ] \
    || .venv/bin/python -m pip install -q --target "$folder" "hip-python==$version"
done
