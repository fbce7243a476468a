#!/usr/bin/env bash
# Everything that should be run first on a machine with an NVIDIA GPU, in steps; writes one report.
#
#   benchmarks/first_gpu_hour.sh [--dry-run] [--seconds 540] [--out FOLDER] [--earlier FOLDER] [--wheels FOLDER]
#                                [STEP ...]
#
#   --dry-run   checks that each step could be run, without running it
#   --seconds   begins no step that could end later than this; a step takes at most 400 seconds
#   --out       logs and report.md; the folder $OUT, if that is set, else benchmarks/results/first_gpu_hour
#   --earlier   the folder of an earlier call, whose finished steps are taken over and not run again
#   --wheels    wheels of packages that the machine lacks; they are unpacked into FOLDER/site, for these steps only
#
# Runs from the source tree, without Ray, a checkpoint or a network. Steps that are done are skipped, so calling it again
# goes on where it stopped; all steps together take at most 25 minutes. Exit status: 0 if all steps have passed, 1 if one
# has failed, 2 if an argument can't be used, 3 if there was no time for all of them.
#
# The first step names the modules that are missing. For a machine without a package registry, get them elsewhere:
#   pip download -d wheels -c constraints.txt --no-deps --only-binary=:all: --python-version 3.12 \
#       --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 PACKAGE ...
set -u
cd "$(dirname "$0")/.."

dry=false seconds=540 out=${OUT:-benchmarks/results/first_gpu_hour} earlier= wheels= wanted=()
while (($#)); do
    case $1 in
        --dry-run) dry=true ;;
        --seconds) seconds=$2; shift ;;
        --out) out=$2; shift ;;
        --earlier) earlier=$2; shift ;;
        --wheels) wheels=$2; shift ;;
        --help | -h) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
        -*) echo "$1 is unknown; allowed: --dry-run, --seconds, --out, --earlier, --wheels" >&2; exit 2 ;;
        *) wanted+=("$1") ;;
    esac
    shift
done

python=${PYTHON:-python3}
test="$python -m pytest -q -p no:cacheprovider --override-ini addopts="
# Kernels are compiled on several cores where pytest-xdist is there.
"$python" -c 'import xdist' 2>/dev/null && test+=" -n 4"
# Kernels' tests run on the GPU where there is one; those that only compile, or are of the CPU's kernels, are left out.
kernels="tests/kernels/test_elementwise_kernels.py tests/kernels/test_paged_attention.py
 tests/kernels/test_kv_checksum.py tests/kernels/test_kv_frame.py tests/kernels/test_quant_gemv.py
 tests/kernels/test_quant_matmul.py tests/kernels/test_sample_kernel.py
 tests/kernels/test_grouped_matmul.py tests/kernels/test_latent_decode.py tests/kernels/test_state_kernels.py"
few="tests/kernels/test_kv_frame.py tests/kernels/test_kv_checksum.py tests/kernels/test_paged_attention.py"
# What the steps import: all of the project's dependencies but Ray and the command line's.
modules="aiohttp aiohttp_cors cryptography google.protobuf grpc grpc_health grpc_reflection hypothesis jinja2 msgpack numpy
 prometheus_client pydantic pytest pytest_timeout safetensors tokenizers transformers triton xxhash yaml"
missing="import importlib.util as u, sys; m = [n for n in sys.argv[1:] if not (u.find_spec(n.split(\".\")[0]) and u.find_spec(n))];
 print(\"missing modules:\", *m); sys.exit(len(m))"
engine="tests/engine/runner/test_gpu_engine.py tests/engine/runner/test_gpu_runner.py tests/engine/runner/test_gpu_heads.py
 tests/engine/kv/test_pool.py tests/engine/models/test_models_logits.py tests/engine/models/test_quantized_models.py tests/engine/test_prefill_attention.py
 tests/engine/general/test_general_experts.py"
links="tests/transfer/test_transports.py tests/transfer/test_gpu_frames.py"

names=() ; declare -A limit command
step() { names+=("$1"); limit[$1]=$2; command[$1]=${3//$'\n'/}; }
step environment 30 "nvidia-smi; $python -c '$missing' $modules && $python benchmarks/gpu.py --only environment"
step kernels 220 "$test $kernels tests/kernels/test_far_blocks.py -k 'not compiled'"
step engine 220 "$test $engine -k 'gpu or bytes'"
step links 100 "$test $links -k 'nccl or gpu_frames'"
step pair 180 "$test tests/e2e/test_recovery.py -m ''"
step sanitizer 200 "compute-sanitizer --error-exitcode 9 ${test% -n 4} $few -k 'not compiled and not on_a_gpu and not every'"
step gpu_kernels 280 "$python benchmarks/gpu.py --only kernels,attention --seconds 255 --out $out/gpu_kernels.json"
step gpu_engine 270 "$python benchmarks/gpu.py --only engine,links --seconds 245 --out $out/gpu_engine.json"

for name in "${wanted[@]}"; do
    [[ -v command[$name] ]] || { echo "step $name is unknown; allowed: ${names[*]}" >&2; exit 2; }
done
((${#wanted[@]})) || wanted=("${names[@]}")

mkdir -p "$out"
[[ -z $earlier ]] || cp -n "$earlier"/* "$out"/
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [[ $wheels ]]; then
    wheels=$(cd "$wheels" && pwd) || exit 2
    if ! $dry; then
        "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$wheels/site" "$wheels"/*.whl || exit 1
    fi
    PYTHONPATH+=":$wheels/site"
fi

# A dry run looks at whether the step's program and files are there.
check() {
    local word
    for word in ${command[$1]}; do
        case $word in
            *.py | tests/* | benchmarks/*.py) [[ -e $word ]] || { echo "$word is missing"; return 1; } ;;
        esac
    done
    echo "${command[$1]}"
}

report() {
    local name
    echo "# The first hour on a GPU"
    echo
    echo "| step | result | seconds |"
    echo "|---|---|---|"
    for name in "${names[@]}"; do
        if [[ -e $out/$name.result ]]; then echo "| $name | $(tr '\n' ' ' <"$out/$name.result" | sed 's/ $//; s/ / | /') |"
        else echo "| $name | not run | |"; fi
    done
    for name in "${names[@]}"; do
        [[ -e $out/$name.log ]] || continue
        echo; echo "## $name"; echo; echo '```'; tail -n 40 "$out/$name.log"; echo '```'
    done
}

status=0 began=$SECONDS
for name in "${wanted[@]}"; do
    [[ -e $out/$name.result && $(<"$out/$name.result") == passed* ]] && { echo "$name: done earlier"; continue; }
    if ((SECONDS - began + limit[$name] > seconds)); then
        echo "$name: no time left; call again"
        ((status)) || status=3
        continue
    fi
    echo "$name: at most ${limit[$name]} s"
    from=$SECONDS
    if $dry; then check "$name" >"$out/$name.log" 2>&1; code=$?
    else timeout -k 10 "${limit[$name]}" bash -c "${command[$name]}" >"$out/$name.log" 2>&1; code=$?; fi
    case $code in 0) result=passed ;; 124 | 137) result=timeout ;; *) result=failed ;; esac
    echo "$result $((SECONDS - from))" >"$out/$name.result"
    echo "$name: $result, $((SECONDS - from)) s"
    [[ $result == passed ]] || { tail -n 5 "$out/$name.log"; status=1; }
    report >"$out/report.md"
done
report >"$out/report.md"
echo "$out/report.md"
exit $status
