#!/usr/bin/env bash
# Packages that `python -m scripts.bench peers` compares with, for a CUDA machine without a package index (CPython 3.12,
# Linux x86-64, with torch and triton).
#   scripts/peer_wheels.sh pack FOLDER          with an index: FOLDER/part1/, FOLDER/part2/, ... of at most 45 MiB each
#   scripts/peer_wheels.sh unpack FOLDER SITE   there: installs FOLDER/part*/* into SITE and writes SITE/env.sh to source
set -euo pipefail

PACKAGES=(
  nvidia-cudnn-frontend==1.32.0 flash-attn-4==4.0.0b36 fastvideo-kernel==0.3.5
  nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.1
  quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5
  cuda-bindings==13.5.0 cuda-pathfinder==1.9.1 einops==0.8.2 protobuf==7.36.2
)
MOST=45m

pack() {
  local folder=$1 site
  site=$(mktemp -d)
  trap "rm -rf '$site'" EXIT
  # shellcheck disable=SC2046
  python3 -m pip install -q --no-deps --no-compile --only-binary=:all: --python-version 3.12 --implementation cp \
    $(printf -- '--platform manylinux_2_%s_x86_64 ' 17 24 27 28 34 35) --platform manylinux2014_x86_64 \
    --target "$site" "${PACKAGES[@]}"
  # the driver is there; headers, other targets and kernels of other architectures are not run
  rm -rf "$site"/{include,attn_qat_infer,bin} "$site"/fp4*.so "$site"/fastvideo_kernel.libs/libcuda-*
  find "$site" \( -name '*.a' -o -path '*/stubs/*.so' -o -path '*/tests/*' \) -type f -delete
  find "$site" -name '*.so*' -type f -exec strip --strip-unneeded {} + || true
  rm -rf "$folder"/part*
  mkdir -p "$folder"
  tar -C "$site" -c . | xz -T0 -6 | split -b "$MOST" --numeric-suffixes=1 --suffix-length=1 - "$folder/peers.tar.xz."
  local file
  for file in "$folder"/peers.tar.xz.*; do
    mkdir "$folder/part${file##*.}"
    mv "$file" "$folder/part${file##*.}/"
  done
  du -h "$folder"/part*/*
}

unpack() {
  local folder=$1 site=$2 library driver
  mkdir -p "$site/lib"
  cat "$folder"/part*/peers.tar.xz.* | tar -xJ -C "$site"
  # fastvideo-kernel is linked with a driver by another name, and with one function of a newer NCCL that it never calls
  library=$(grep -aom1 'libcuda-[0-9a-f]*\.so[.0-9]*' "$site"/fastvideo_kernel/_C/*.so | head -1)
  driver=$(python3 -c 'import ctypes; ctypes.CDLL("libcuda.so.1")
print(next(line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line))' 2>/dev/null) || driver=libcuda.so.1
  ln -sf "$driver" "$site/fastvideo_kernel.libs/$library"
  echo 'int ncclCommQueryProperties(void) { return 5; }' | cc -shared -fPIC -x c - -o "$site/lib/nccl_stub.so"
  cat > "$site/env.sh" <<EOF
export PYTHONPATH=$site:$site/nvidia_cutlass_dsl/dsl_packages\${PYTHONPATH:+:\$PYTHONPATH}
export LD_PRELOAD=$site/lib/nccl_stub.so
EOF
}

case ${1:-} in
  pack) pack "$2" ;;
  unpack) unpack "$(realpath "$2")" "$(realpath -m "$3")" ;;
  *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
