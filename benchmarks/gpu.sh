#!/usr/bin/env bash
# Builds the package and checks it on a CUDA device, in less than ten minutes and without any download.
#
#   bash benchmarks/gpu.sh             needs one CUDA device, and a Python with torch, CuPy, pytest and hypothesis
#   bash benchmarks/gpu.sh --dry-run   needs none: builds, compiles for every architecture, shows what would run
#
# PYTHON      the interpreter; default: .venv/bin/python where that is, else python3
# WHEELHOUSE  a folder of wheels that come before what is installed (where nanobind is missing, say). One of this package
#             (pip wheel --no-deps .) gives its compiled module where there is no compiler or no Python.h.
# OUT         a folder for the log and the tables as JSON
# TIME        seconds for everything; default 570
#
# Each step has a time limit, a failed one does not stop the next, and the end says what ran and what did not.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DRY=0
case "${1:-}" in
'') ;;
--dry-run) DRY=1 ;;
*) echo "expected nothing or --dry-run, got $1" >&2; exit 2 ;;
esac
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
BUDGET=${TIME:-570}
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
mkdir -p "${OUT:-$SCRATCH}"
LOG=${OUT:-$SCRATCH}/gpu.log
: >"$LOG"
SUMMARY=()
FAILED=0
DEVICE=1
# Processes of the tests and benchmarks import the package and the benchmarks' support from here.
export PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1

note() { SUMMARY+=("$(printf '%-9s %s' "$1" "$2")"); }

# step LIMIT NAME COMMAND...: status 3 of the command means that something it needs is not there.
step() {
    local limit=$1 name=$2 left=$((BUDGET - SECONDS)) began=$SECONDS status
    shift 2
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 5 ]; then
        note skipped "$name (no time left)"
        return
    fi
    printf '\n== %s (at most %s s)\n   %s\n' "$name" "$limit" "$*" | tee -a "$LOG"
    timeout -k 10 "$limit" "$@" 2>&1 | tee -a "$LOG"
    status=${PIPESTATUS[0]}
    case $status in
    0) note ran "$name ($((SECONDS - began)) s)" ;;
    3) note skipped "$name (what it needs is not here, see above)" ;;
    124 | 137) note FAILED "$name (longer than $limit s)"; FAILED=1 ;;
    *) note FAILED "$name (status $status)"; FAILED=1 ;;
    esac
}

# The same, for what needs a device; only shown in a dry run.
device_step() {
    if [ "$DRY" = 1 ]; then
        note 'would run' "$2, at most $1 s: ${*:3}"
    elif [ "$DEVICE" = 0 ]; then
        note skipped "$2 (no CUDA device)"
    else
        step "$@"
    fi
}

describe() {
    command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    command -v nvcc >/dev/null && nvcc --version | tail -n 1
    "$PYTHON" - <<'PY'
import importlib.metadata as metadata, platform
print("python", platform.python_version())
for name in ("torch", "numpy", "cupy-cuda13x", "cupy-cuda12x", "nanobind", "setuptools", "pytest", "hypothesis"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "not installed")
PY
}

wheels() {
    local file others=()
    for file in "$WHEELHOUSE"/*.whl; do
        case $file in */hybridpar-*) ;; *) others+=("$file") ;; esac
    done
    [ ${#others[@]} = 0 ] || "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --upgrade \
        --target "$SCRATCH/site" "${others[@]}"
}

build() {
    if [ "$DRY" = 1 ]; then # a module that others are using is not replaced
        "$PYTHON" setup.py -q build --build-lib "$SCRATCH/build" --build-temp "$SCRATCH/objects" &&
            ls "$SCRATCH"/build/hybridpar/kernels/_native*.so "$SCRATCH"/build/hybridpar/kernels/_cuda/*
    else
        "$PYTHON" setup.py -q build_ext --inplace --build-temp "$SCRATCH/objects" || prebuilt
    fi
}

prebuilt() {
    local tag file
    tag=$("$PYTHON" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    for file in "$WHEELHOUSE"/hybridpar-*-"$tag"-*.whl; do
        [ -f "$file" ] || { echo "no wheel of this package for $tag in WHEELHOUSE=$WHEELHOUSE"; return 1; }
        echo "not built here; taking the compiled module from $file"
        "$PYTHON" - "$file" <<'PY'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        if name.startswith("hybridpar/kernels/_native") and name.endswith(".so"):
            print(wheel.extract(name, "."))
PY
    done
}

compile() {
    command -v nvcc >/dev/null || return 3
    for source in csrc/cuda/*.cu; do
        for arch in sm_75 sm_80 sm_90; do
            echo "nvcc $arch $source"
            nvcc -std=c++17 -fmad=false -arch=$arch -cubin -Xptxas -v -o /dev/null "$source" >"$SCRATCH/nvcc" 2>&1 ||
                { cat "$SCRATCH/nvcc"; return 1; }
            if grep -q '[1-9][0-9]* bytes spill' "$SCRATCH/nvcc"; then
                echo "registers spill:"; grep -B 1 '[1-9][0-9]* bytes spill' "$SCRATCH/nvcc"; return 1
            fi
        done
    done
}

memcheck() {
    command -v compute-sanitizer >/dev/null || return 3
    # Each tensor in memory of its own, so that one beyond its end is seen.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" -m pytest -q -x \
        tests/gpu/test_pack.py tests/gpu/test_head_kernels.py \
        -k 'alignment and float16 and bfloat16 or channels_last or in_place or bit_for_bit or are_rounded or ordered'
}

racecheck() {
    command -v compute-sanitizer >/dev/null || return 3
    compute-sanitizer --tool racecheck --error-exitcode 9 "$PYTHON" -m pytest -q -x \
        tests/gpu/test_head_kernels.py -k 'ordered'
}

export -f wheels build prebuilt compile memcheck racecheck describe
export PYTHON DRY SCRATCH WHEELHOUSE="${WHEELHOUSE:-}"
PYTEST=("$PYTHON" -m pytest -q -rs -m gpu)

step 20 'what is here' bash -c describe
if [ -n "$WHEELHOUSE" ]; then
    step 60 'wheels' bash -c wheels
    export PYTHONPATH="$SCRATCH/site:$PYTHONPATH"
fi
step 240 'build' bash -c build
step 150 'nvcc' bash -c compile
step 90 'nvrtc' "$PYTHON" benchmarks/gpu/nvrtc.py
mapfile -t OTHERS < <(grep -rl --include='*.py' 'mark\.gpu' tests | grep -v '^tests/gpu/' | sort)
if [ "$DRY" = 1 ]; then
    step 60 'tests for a device' "${PYTEST[@]}" --collect-only tests/gpu "${OTHERS[@]}"
    step 60 'head, on the CPU' "$PYTHON" benchmarks/gpu/head.py --dry-run
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    note FAILED 'looking for a CUDA device: torch finds none'
    FAILED=1 DEVICE=0
fi
device_step 100 'kernels of the head against references' "${PYTEST[@]}" tests/gpu/test_head_kernels.py
device_step 180 'head' "$PYTHON" benchmarks/gpu/head.py --seconds 100 ${OUT:+--json "$OUT/head.json"}
device_step 120 'kernels against references' "${PYTEST[@]}" tests/gpu/test_pack.py
device_step 40 'streams' "${PYTEST[@]}" tests/gpu/test_streams.py
device_step 120 'gloo lanes of 2 ranks on one device, NCCL lane of 1' "${PYTEST[@]}" tests/gpu/test_lanes.py
device_step 100 'pack bandwidth' "$PYTHON" benchmarks/gpu/pack.py ${OUT:+--json "$OUT/pack.json"}
device_step 90 'other tests for a device' "${PYTEST[@]}" "${OTHERS[@]}"
device_step 90 'memory checker' bash -c memcheck
device_step 60 'checker of races in a block' bash -c racecheck

{
    printf '\n== summary after %s s\n' "$SECONDS"
    printf '%s\n' "${SUMMARY[@]}"
} | tee -a "$LOG"
exit $FAILED
