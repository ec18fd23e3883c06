#!/usr/bin/env bash
# Builds, tests and measures the CUDA flavour on a machine with a GPU and without a network.
#
#   tools/gpu_session.sh [options] STAGE...      stages: build ensure ops sanitize e2e bench synthetic profile context types
#                                                (ensure: build unless the CUDA flavour loads already)
#
#   --out DIR         where logs and results go                            (default: gpu-session)
#   --wheels DIR      Python packages that the machine lacks, as wheels
#   --upstream FILE   trimmed upstream archive (vendor/prepare_upstream.py trim ARCHIVE), for `build`
#   --extension FILE  a built _ggml_cuda.abi3.so (or .so.xz), instead of `build`
#   --arch LIST       compute capabilities to build for                    (default: native)
#   --shape, --type   the synthetic target                                 (default: 27b q4_k_m)
#   --device NAME     what the tests and benchmarks run on                 (default: the first GPU)
#
# Every stage has its own log and time limit; a stage that fails does not keep the next from running.
set -uo pipefail
cd "$(dirname "$0")/.."

out=gpu-session wheels="" upstream="" extension="" arch=native shape=27b type=q4_k_m device=auto
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --out) out="$2" ;; --wheels) wheels="$2" ;; --upstream) upstream="$2" ;; --extension) extension="$2" ;;
        --arch) arch="$2" ;; --shape) shape="$2" ;; --type) type="$2" ;; --device) device="$2" ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done
work="${TMPDIR:-/tmp}/pyggml-spec-gpu"
mkdir -p "$out" "$work"
python=python3
export PYTHONUNBUFFERED=1 GGML_NO_BACKTRACE=1

# name, seconds, command...
stage() {
    local name="$1" limit="$2" begin=$SECONDS; shift 2
    timeout -k 5 "$limit" bash -c 'set -uo pipefail; "$@"' _ "$@" >"$out/$name.log" 2>&1
    printf '== %-14s exit %d in %d s\n' "$name" $? $((SECONDS - begin))
}

machine() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv,noheader
    nvcc --version | tail -2
    nproc; uname -r; "$python" --version
}

install() {
    [[ -n "$wheels" ]] && "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" --upgrade "$wheels"/*.whl
    case "$extension" in
        "") ;;
        *.xz) "$python" -c 'import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())' "$extension" \
                  >pyggml_spec/_native/_ggml_cuda.abi3.so ;;
        *) cp "$extension" pyggml_spec/_native/ ;;
    esac
}

build() {
    [[ -n "$upstream" ]] && export PYGGML_SPEC_UPSTREAM="$(realpath "$upstream")"
    "$python" -m cmake --version >/dev/null 2>&1 && cmake="$python -m cmake" || cmake=cmake
    $cmake -S . -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" \
        -DPYGGML_SPEC_FLAVOURS=cuda -DPYGGML_SPEC_CUDA_ARCHITECTURES="$arch" -DPYGGML_SPEC_CUDA_DEVELOPMENT=ON &&
    $cmake --build "$work/build" -- -j"$(nproc)" && cp "$work/build/_ggml_cuda.abi3.so" pyggml_spec/_native/
}

ensure() {
    "$python" -c 'import sys; from pyggml_spec._native import lib, skipped; print(lib, skipped); sys.exit("_cuda" not in repr(lib))' || build
    "$python" -c 'from pyggml_spec.ggml import list_devices; print(*list_devices(), sep="\n")'
}

tests() {  # selected tests, several at a time where pytest-xdist is there
    local parallel=()
    "$python" -c 'import xdist' 2>/dev/null && parallel=(-n "${jobs:-8}")
    "$python" -m pytest -q -m gpu --maxfail=20 -p no:cacheprovider -o filterwarnings= "${parallel[@]}" "$@"
}

sanitize() {  # the tests without random cases, under each checker
    local tool few="slots or strided or many_rows or ascending or given_gates or long_lists"
    for tool in memcheck racecheck initcheck; do
        echo "-- $tool"
        timeout "${check_s:-150}" compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q -m gpu -p no:cacheprovider -o filterwarnings= \
            tests/ops/test_conv_tree.py tests/ops/test_delta_net_tree.py tests/ops/test_top_k.py tests/ops/test_attention.py -k "$few"
        echo "-- $tool: exit $?"
    done
}

synthetic() {
    "$python" tools/make_synthetic.py --shape "$shape" --type "$type" "$work/target.gguf" &&
    "$python" tools/make_synthetic.py --shape "$shape" --type q8_0 --drafter "$work/drafter.gguf"
}

profile() {  # kernels of one call, as launched one by one
    local call
    for call in "--width 1" "--width 16" "--prefill 512"; do
        echo "-- $call"
        # shellcheck disable=SC2086
        timeout 100 ncu --clock-control none --cache-control none --profile-from-start off --csv --page raw --log-file "$work/p.csv" \
            --metrics gpu__time_duration.sum,dram__bytes.sum "$python" tools/profile_gpu.py --target "$work/target.gguf" $call
        "$python" tools/profile_gpu.py --summarise "$work/p.csv"
    done
}

context() {  # the same calls behind a short and a long context
    local n
    for n in 2048 32768; do
        "$python" tools/bench_gpu.py --device "$device" --target "$work/target.gguf" --drafter "$work/drafter.gguf" \
            --context $n --n-ctx 40960 --prefill 0 --widths 1,8,16,22
    done
}

types() {  # the widths in other types
    local type
    for type in iq4_xs q8_0; do
        "$python" tools/make_synthetic.py --shape "$shape" --type $type "$work/other.gguf" &&
        "$python" tools/bench_gpu.py --device "$device" --target "$work/other.gguf"
        rm -f "$work/other.gguf"
    done
}

export out work wheels upstream extension arch shape type device python
export -f machine install build ensure tests sanitize synthetic profile context types

stage machine 20 machine
stage install 60 install
export PYTHONPATH="$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}"
for name in "$@"; do
    case "$name" in
        build)     stage build 420 build ;;
        ensure)    stage ensure 420 ensure ;;
        ops)       stage ops 240 tests tests/ops ;;
        sanitize)  stage sanitize 400 sanitize ;;
        e2e)       jobs=2 stage golden 120 tests tests/e2e/test_golden.py
                   jobs=4 stage lossless 180 tests tests/e2e/test_lossless.py tests/e2e/test_exact.py ;;
        bench)     stage bench 90 "$python" tools/bench_gpu.py --device "$device" --context 512 --n-ctx 2048 --prefill 1024 --generate 128
                   stage bench-exact 60 "$python" tools/bench_gpu.py --device "$device" --context 512 --n-ctx 2048 --prefill 0 \
                       --widths 1,8,16,32 --generate 128 --exact ;;
        synthetic) stage synthetic 180 synthetic
                   stage bench-$shape-$type 240 "$python" tools/bench_gpu.py --device "$device" --target "$work/target.gguf" \
                       --drafter "$work/drafter.gguf" ;;
        profile)   stage profile 300 profile ;;
        context)   stage context 180 context ;;
        types)     stage types 240 types ;;
        *) echo "unknown stage $name" >&2; exit 2 ;;
    esac
done
for log in "$out"/*.log; do printf '\n---- %s\n' "$log"; tail -n "${LINES_SHOWN:-12}" "$log" | cut -c1-400; done
