#!/usr/bin/env bash
# Builds, tests and measures the CUDA flavour on a machine with a GPU and without a network.
#
#   tools/gpu_session.sh [options] STAGE...
#
#   ensure    build unless the CUDA flavour loads already      build     build
#   ops       operations against references                    sanitize  the same under compute-sanitizer
#   e2e       whole models, tests with a device                exact40   40 prompts x 256 tokens, the same text (--exact)
#   bench     the embedded pair                                baseline  one shape and type beside llama.cpp, and the bars
#   types     the same in q4_k_m, iq4_xs and q8_0              shapes    the 9b and 4b shapes with drafters
#   impose    rounds at an imposed acceptance                  profile   kernels of one call (8 layers of the shape)
#
#   --out DIR           where logs and results go                          (default: gpu-session)
#   --pack FILE         afterwards all of it, as .tar.gz
#   --work DIR          where models are written, up to 45 GB              (default: in the folder for temporary files)
#   --wheels DIR        Python packages that the machine lacks, as wheels
#   --upstream FILE     trimmed upstream archive (vendor/prepare_upstream.py trim ARCHIVE), for `build`
#   --extension FILE    a built _ggml_cuda.abi3.so (or .so.xz), instead of `build`
#   --llama-bench FILE  llama.cpp's program (or .xz) to measure beside ours
#   --arch LIST         compute capabilities to build for                  (default: native)
#   --shape, --type     the synthetic target of baseline, impose, profile  (default: 27b q4_k_m)
#   --impose LIST       acceptance to impose, see `pyggml-spec bench`      (default: 0.827: chains gain 5.5 tokens)
#   --device NAME       what the tests and benchmarks run on               (default: the first GPU)
#   --quick             small sizes, to try the script itself (with --shape tiny --device CPU)
#
# Every stage has its own log and time limit; a stage that fails does not keep the next from running.
set -uo pipefail
cd "$(dirname "$0")/.."

out=gpu-session pack="" work="${TMPDIR:-/tmp}/pyggml-spec-gpu" wheels="" upstream="" extension="" llama_bench=""
arch=native shape=27b type=q4_k_m device=auto quick="" impose=0.827
refuse() { echo "$1; the head of $0 lists options and stages" >&2; exit 2; }
while [[ "${1:-}" == --* ]]; do
    [[ "$1" == --quick || $# -ge 2 ]] || refuse "$1 needs a value"
    case "$1" in
        --quick) quick=yes; shift; continue ;;
        --out) out="$2" ;; --pack) pack="$2" ;; --work) work="$2" ;; --wheels) wheels="$2" ;; --upstream) upstream="$2" ;;
        --extension) extension="$2" ;; --llama-bench) llama_bench="$2" ;; --arch) arch="$2" ;; --shape) shape="$2" ;;
        --type) type="$2" ;; --impose) impose="$2" ;; --device) device="$2" ;;
        *) refuse "there is no option $1" ;;
    esac
    shift 2
done
[[ $# -gt 0 ]] || refuse "no stage is named"
for name in "$@"; do
    [[ " build ensure ops sanitize e2e exact40 bench baseline types shapes impose profile " == *" $name "* ]] || refuse "there is no stage $name"
done
[[ "${device,,}" == cpu ]] && device=CPU
mkdir -p "$out" "$work"
out="$(realpath "$out")" work="$(realpath "$work")" python=python3
export PYTHONUNBUFFERED=1 GGML_NO_BACKTRACE=1
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64"

# Run a function or program with a time limit and a log of its own: name, seconds, command...
stage() {
    local name="$1" limit="$2" begin=$SECONDS; shift 2
    limit="$limit" timeout -k 5 "$limit" bash -c 'set -uo pipefail; "$@"' _ "$@" >"$out/$name.log" 2>&1
    printf '== %-14s exit %d in %d s\n' "$name" $? $((SECONDS - begin))
}

seconds_left() {  # of this stage, less some for the end
    echo $((limit - SECONDS - 15))
}

machine() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv,noheader
    nvcc --version | tail -2
    nproc; uname -r; "$python" --version
    df -h "$work" | tail -1
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
    local cmake=cmake
    [[ -n "$upstream" ]] && export PYGGML_SPEC_UPSTREAM="$(realpath "$upstream")"
    "$python" -m cmake --version >/dev/null 2>&1 && cmake="$python -m cmake"
    $cmake -S . -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" \
        -DPYGGML_SPEC_FLAVOURS=cuda -DPYGGML_SPEC_CUDA_ARCHITECTURES="$arch" -DPYGGML_SPEC_CUDA_DEVELOPMENT=ON &&
    $cmake --build "$work/build" -- -j"$(nproc)" && cp "$work/build/_ggml_cuda.abi3.so" pyggml_spec/_native/
}

ensure() {
    "$python" -c 'import sys; from pyggml_spec._native import lib, skipped; print(lib, skipped); sys.exit("_cuda" not in repr(lib))' || build
    "$python" -c 'from pyggml_spec.ggml import list_devices; print(*list_devices(), sep="\n")'
}

tests() {  # selected tests on the device, several at a time where pytest-xdist is there
    local parallel=() marker=gpu
    [[ "$device" == CPU ]] && marker="not gpu"
    "$python" -c 'import xdist' 2>/dev/null && parallel=(-n "${jobs:-8}" --dist "${dist:-load}")
    PYGGML_SPEC_FILES_LEFT_AT_HOME=1 "$python" -m pytest -q -m "$marker" --maxfail=40 --durations=5 -p no:cacheprovider \
        -o filterwarnings= "${parallel[@]}" "$@"
}

sanitize() {  # the tests without random cases, under each checker
    local tool few="slots or strided or many_rows or ascending or given_gates or long_lists or every_variant or memory_change or tap_order"
    for tool in memcheck racecheck initcheck; do
        echo "-- $tool"
        timeout "${check_s:-150}" compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q -m gpu -p no:cacheprovider \
            -o filterwarnings= tests/ops/test_conv_tree.py tests/ops/test_delta_net_tree.py tests/ops/test_top_k.py \
            tests/ops/test_attention.py tests/ops/test_norms.py tests/ops/test_block_conv.py -k "$few"
        echo "-- $tool: exit $?"
    done
}

model() {  # SHAPE:KIND, where the synthetic model lies
    echo "$work/${1/:/-}.gguf"
}

write_models() {  # SHAPE:KIND..., those that are not there yet, side by side; KIND: a type, drafter, or 8layers
    local each path kind process processes=() begin=$SECONDS
    for each in "$@"; do
        path="$(model "$each")"
        [[ -e "$path" ]] && continue
        case "${each##*:}" in
            drafter) kind="--type q8_0 --drafter" ;;
            8layers) kind="--type $type --layers 8" ;;
            *) kind="--type ${each##*:}" ;;
        esac
        # shellcheck disable=SC2086
        { "$python" tools/make_synthetic.py --shape "${each%%:*}" $kind "$path.part" && mv "$path.part" "$path"; } &
        processes+=($!)
    done
    for process in "${processes[@]}"; do wait "$process" || return 1; done
    echo "models written in $((SECONDS - begin)) s"
}

compare() {  # name of the results, SHAPE:KIND, options
    local name="$1" which="$2"; shift 2
    # shellcheck disable=SC2086
    "$python" tools/bench_gpu_llama.py --target "$(model "$which")" ${llama_bench:+--llama-bench "$llama_bench"} --device "$device" \
        --json "$out/$name.json" --seconds "$(seconds_left)" "$@" ${quick:+--context 64 --prefill 64 --plain 2 --widths 1,16,22}
}

baseline() {
    write_models "$shape:$type" && compare "baseline-$shape-$type" "$shape:$type" ${quick:+--long 128 --long-widths 1,16}
}

types() {  # two files at a time fit beside the one of baseline
    local type share=3
    write_models "$shape:q4_k_m" "$shape:iq4_xs"
    for type in q4_k_m iq4_xs q8_0; do
        write_models "$shape:$type" && limit=$((SECONDS + (limit - SECONDS) / share)) \
            compare "types-$shape-$type" "$shape:$type" --rounds 1 --long 0
        [[ "$type" == q4_k_m ]] || rm -f "$(model "$shape:$type")"
        share=$((share - 1))
    done
}

shapes() {
    local shape share=2 all=(9b 4b)
    [[ -n "$quick" ]] && all=(tiny)
    write_models "${all[@]/%/:q4_k_m}" "${all[@]/%/:drafter}"
    for shape in "${all[@]}"; do
        limit=$((SECONDS + (limit - SECONDS) / share)) compare "shapes-$shape" "$shape:q4_k_m" \
            --drafter "$(model "$shape:drafter")" --widths 1,2,4,8,16,22 --long 0
        share=$((share - 1))
    done
}

impose() {  # behind 2048 tokens: a letter is a token to synthetic models
    local tokens=512 characters=2048 repeats=5
    [[ -n "$quick" ]] && tokens=16 characters=128 repeats=2
    write_models "$shape:$type" "$shape:drafter" || return 1
    cat tests/e2e/prompts.txt{,,,,} | tr -cd 'a-z ' | head -c "$characters" >"$work/prompt.txt"
    "$python" -m pyggml_spec bench -m "$(model "$shape:$type")" -md "$(model "$shape:drafter")" --device "$device" -c 8192 \
        -f "$work/prompt.txt" -n "$tokens" --repeats "$repeats" --impose "$impose" --budget 15,22 --widths 1,16,23 >"$out/impose.txt"
    head -n -1 "$out/impose.txt"
    tail -n 1 "$out/impose.txt" >"$out/impose.json"
    "$python" -c '
import json, sys
report = json.load(open(sys.argv[1]))
for name, way in report["contenders"].items():
    parts = [way[part + "_ms_per_round"] for part in ("draft", "verify", "host")]
    share = parts[2] / sum(parts)
    print(f"{name:12} {sum(parts):7.3f} ms a round, host {share:.1%}: {'"'pass' if share <= 0.05 else 'MISS'"'} (bar <= 5 %)")
memory = report["memory"]
banks, snapshots = memory["factor_banks"], memory["snapshots_instead_of_banks"]
print(f"banks {banks / 1e6:.0f} MB, a state per node instead {snapshots / 1e6:.0f} MB: {snapshots / banks:.1f} x")
' "$out/impose.json"
}

profile() {  # kernels of one call, as launched one by one
    local call
    write_models "$shape:8layers"
    for call in "--width 1" "--width 16" "--prefill 512"; do
        echo "-- $call"
        # shellcheck disable=SC2086
        timeout 100 ncu --clock-control none --cache-control none --profile-from-start off --csv --page raw --log-file "$work/p.csv" \
            --metrics gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed "$python" tools/profile_gpu.py --target "$(model "$shape:8layers")" $call
        "$python" tools/profile_gpu.py --summarise "$work/p.csv"
    done
}

export out work wheels upstream extension llama_bench arch shape type impose device quick python
export -f machine install build ensure tests sanitize model write_models compare seconds_left baseline types shapes impose profile

stage machine 20 machine
stage install 60 install
export PYTHONPATH="$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}"
for name in "$@"; do
    case "$name" in
        build|ensure) stage "$name" 420 "$name" ;;
        ops)       stage ops 240 tests tests/ops ;;
        sanitize)  stage sanitize 400 sanitize ;;
        e2e)       jobs=4 dist=loadfile stage e2e 420 tests tests/e2e --deselect tests/e2e/test_exact.py::test_forty_prompts ;;
        exact40)   jobs=2 stage exact40 240 tests tests/e2e/test_exact.py -k forty ;;
        bench)     stage bench 90 "$python" tools/bench_gpu.py --device "$device" --context 512 --n-ctx 2048 --prefill 1024 --generate 128
                   stage bench-exact 60 "$python" tools/bench_gpu.py --device "$device" --context 512 --n-ctx 2048 --prefill 0 \
                       --widths 1,8,16,32 --generate 128 --exact ;;
        baseline|types|shapes) stage "$name" 540 "$name" ;;
        impose)    stage impose 300 impose ;;
        profile)   stage profile 320 profile ;;
    esac
done
for log in "$out"/*.log; do
    case "${log##*/}" in
        baseline*|types*|shapes*|impose*|profile*) lines=85 ;;
        ops*|e2e*|exact40*) lines=30 ;;
        *) lines=12 ;;
    esac
    printf '\n---- %s\n' "$log"; tail -n "$lines" "$log" | cut -c1-160
done
[[ -z "$pack" ]] || tar -C "$(dirname "$out")" -czf "$pack" "$(basename "$out")"
