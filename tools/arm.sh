#!/usr/bin/env bash
# The NEON kernels where there is no ARM processor: builds the library for 64-bit ARM and tests it emulated.
# Needs Debian 12, root, and its packages qemu-user and g++-aarch64-linux-gnu; takes about 15 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/arm
mkdir -p "$work"/{debs,wheels,root,site}

dpkg --add-architecture arm64
apt-get update -qq
libraries=(libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1)
python=(python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)
(cd "$work/debs" && apt-get download -qq "${libraries[@]/%/:arm64}" "${python[@]/%/:arm64}")
for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$work/root"; done

# torch 2.7 is the newest whose wheel for ARM needs no CUDA
python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 --dest "$work/wheels" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
    torch==2.7.1 numpy==2.3.4 typing_extensions sympy mpmath networkx jinja2 markupsafe filelock fsspec \
    pytest pluggy iniconfig packaging pygments
for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done

rm -rf "$work/src" && cp -r src "$work/src"
cmake -S . -B "$work/native" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$work/src/aurakv/backends"
cmake --build "$work/native"

emulated() {
    qemu-aarch64 -L "$work/root" -E LD_LIBRARY_PATH="$work/site/torch.libs:$work/site/torch/lib" \
        -E PYTHONPATH="$work/src:$work/site" -E PYTHONDONTWRITEBYTECODE=1 "$work/root/usr/bin/python3.11" "$@"
}
emulated -m pytest -q -p no:cacheprovider -m "not full" \
    tests/backends/test_conformance.py --backend native-neon --backend native-generic
emulated tools/native_fuzz.py "${CASES:-300}" native-neon native-generic
