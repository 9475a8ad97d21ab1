#!/usr/bin/env bash
# Everything that several GPUs of one host are for, in one call of under ten minutes: doctor, self-test, a rank that does not
# come, whole calls against peer copies, overlap, pull against push. See docs/several-gpus.md.
#
#     scripts/multi_gpu.sh [--dry-run] N [OUT]
#
# --dry-run, or DEVICE=cpu: the same steps with N gloo processes on CPUs, the collective backend and small shapes.
# Every step has a time limit and a log in OUT; nothing that a step started outlives it. Exit status 1 if a step failed.
set -uo pipefail
export LC_ALL=C.UTF-8

usage() {
    sed -n 's/^# \{0,1\}//; 2,9p' "$0"
    exit 2
}

device=${DEVICE:-cuda}
[ "${1:-}" = "--dry-run" ] && { device=cpu; shift; }
[[ "${1:-}" =~ ^[1-9][0-9]*$ ]] || usage
n=$1
out=${2:-multi-gpu-$n}
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
"$python" -c 'import torch' || { echo "PYTHON names the interpreter; $python cannot import torch" >&2; exit 2; }
mkdir -p "$out"
out=$(cd "$out" && pwd)

# NVLink multicast stays off.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=160
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

budget=${BUDGET:-560} # seconds for all steps together
grace=10              # seconds between the end of a step's time and its death
steps=$out/steps.tsv
: >"$steps"
failed=0

# What carries the mark of a step and is still there: torchrun gives its workers sessions of their own.
sweep() {
    local path pid
    for path in $(grep -lzx "TILE_EP_STEP=$1" /proc/[0-9]*/environ 2>/dev/null); do
        pid=${path#/proc/}
        kill -KILL "${pid%/environ}" 2>/dev/null
    done
}

# step NAME SECONDS COMMAND...: run it with a log, and note how it went.
step() {
    local name=$1 limit=$2 left=$((budget - SECONDS)) status began word mark
    shift 2
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 5 ]; then
        printf '%s\tnot run\t0\n' "$name" | tee -a "$steps"
        failed=1
        return
    fi
    began=$SECONDS
    mark="$$-$name"
    TILE_EP_STEP=$mark timeout -k "$grace" "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null
    status=$?
    sweep "$mark"
    case $status in
        0) word=ok ;;
        124 | 137) word="over $limit s" failed=1 ;;
        *) word="status $status" failed=1 ;;
    esac
    printf '%s\t%s\t%s\n' "$name" "$word" $((SECONDS - began)) | tee -a "$steps"
}

ranks=("$python" -m torch.distributed.run --standalone --nproc-per-node "$n")
selftest=("${ranks[@]}" -m tile_ep.selftest_processes)
bench=("${ranks[@]}" -m tile_ep.cli bench)
variant=("${ranks[@]}" "$root/scripts/bench_variant.py")

if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=
    cases=4 rounds=20 absent=2
    shape=(--backend collective --tokens 64 --hidden 256 --topk 4 --experts $((4 * n)) --repeat 3 --quick)
    variants=(pull)
else
    there=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 2
    [ "$there" -ge "$n" ] || { echo "$there GPUs are visible, $n are needed; --dry-run needs none" >&2; exit 2; }
    cases=${CASES:-16} rounds=${ROUNDS:-300} absent=6
    shape=(--backend nvlink --tokens "${TOKENS:-8192}" --hidden 7168 --topk 8 --experts 256 --repeat "${REPEAT:-15}")
    variants=(push by-warp)
fi

step doctor 60 "$python" -m tile_ep.cli doctor --json "$out/doctor.json"
step selftest 240 "${selftest[@]}" --cases "$cases" --rounds "$rounds" --limit 120 --skip absent
step dead-rank 60 "${selftest[@]}" --only absent --absent "$absent" --limit 50
step bench 180 "${bench[@]}" "${shape[@]}" --section base --section alone --section sms --sms 16 --sms 8 \
    --json "$out/bench.json" --plots "$out/plots"
step overlap 90 "${bench[@]}" "${shape[@]}" --section overlap --peer none --quick --json "$out/overlap.json"
for kind in "${variants[@]}"; do
    step "selftest-$kind" 60 "${selftest[@]}" --tuning "$kind" --cases 4 --rounds 100 --limit 50 --only compile --only cases --only rounds
    step "bench-$kind" 60 "${variant[@]}" "$kind" bench "${shape[@]}" --section base --peer none --sms 16 --sms 8 \
        --json "$out/bench-$kind.json"
done

"$python" "$root/scripts/multi_gpu_summary.py" "$out" --device "$device" --ranks "$n" | tee "$out/summary.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
exit $failed
