#!/usr/bin/env bash
# All that a machine with one GPU can say of fsfunc, in six minutes at most.
#
#     bash benchmarks/gpu.sh [--device cpu] [--seconds 360] [--parts NAMES] OUT [WHEELS]
#
# The parts, those that say most first: the card, README's programs on it, the tests
# marked "gpu", pairs of steps beside torch's, the first state of a large model, pairs of
# compiled steps. Each has a time limit of its own, and ends without ending the others.
# OUT gets log.txt (what all parts print), summary.txt (the table that is printed last,
# written anew after each part) and JSON. WHEELS is a folder of wheels to install into a
# folder of this run's own; fsfunc is this checkout's. `--device cpu` rehearses all of it.
# `--parts card,pairs` runs some. PYTHON names another one than python3. Ends with 0 if every part was ok.
set -u

device=cuda seconds= parts=card,readme,tests,pairs,state,compiled given=()
while (($#)); do
  case $1 in
    --device) device=$2; shift 2 ;;
    --seconds) seconds=$2; shift 2 ;;
    --parts) parts=$2; shift 2 ;;
    -*) echo "unknown option $1; see the first lines of $0" >&2; exit 2 ;;
    *) given+=("$1"); shift ;;
  esac
done
if ((${#given[@]} < 1 || ${#given[@]} > 2)); then
  echo "usage: $0 [--device cpu] [--seconds N] [--parts NAMES] OUT [WHEELS]" >&2
  exit 2
fi
# A rehearsal's limits leave room for a busy machine.
[[ $device == cpu ]] && slower=5 || slower=1
seconds=${seconds:-$((360 * slower))}
benchmarks=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$benchmarks")
mkdir -p "${given[0]}" && out=$(cd "${given[0]}" && pwd) || exit 2
wheels=${given[1]:+$(cd "${given[1]}" && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$out/log.txt summary=$out/summary.txt failed=0
: > "$log"

export PYTHONPATH=$work/site:$root PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton
export CI=1  # hypothesis keeps no database, and draws alike
# One host without a network: what looks for an interface finds this one.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
unset NCCL_DEBUG RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
[[ $device == cpu ]] && export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=

row() { printf '%-10s %-10s %7s  %s\n' "$@"; }
row part how seconds 'what matters' > "$summary"

# part NAME LIMIT COMMAND...: runs it, within the limit and what is left of all.
part() {
  local name=$1 limit=$(($2 * slower)) left=$((seconds - SECONDS))
  local status how begun from last
  shift 2
  [[ ,$parts,wheels, == *,$name,* ]] || return 0
  if ((left < 8)); then
    row "$name" 'not run' 0 'no time was left' >> "$summary"
    failed=1
    return 0
  fi
  ((limit < left)) || limit=$left
  from=$(($(wc -c < "$log") + 1)) begun=$SECONDS
  printf '\n======== %s, within %s s: %s\n' "$name" "$limit" "$*" >> "$log"
  # Tests end by an interrupt, and so say what they found; all others just end.
  timeout --signal="${signal:-TERM}" --kill-after=6 "$limit" "$@" \
    >> "$log" 2>&1 < /dev/null
  status=$?
  case $status in
    0) how=ok ;;
    124 | 137) how='timed out' ;;
    *) how=failed ;;
  esac
  [[ $how == ok && $device == cpu && ${needs_card:-} ]] && how=rehearsed
  [[ $status == 0 ]] || failed=1
  # The line that a part marks, or else its last one.
  last=$(tail -c "+$from" "$log" | grep -a '^== ' | tail -n 1 | cut -c 4-)
  [[ $last ]] || last=$(tail -c "+$from" "$log" | grep -a '[^[:space:]]' | tail -n 1)
  row "$name" "$how" "$((SECONDS - begun))" "${last:0:400}" >> "$summary"
  tail -c "+$from" "$log" | grep -av '^$' | tail -n "${lines:-12}" | cut -c -300
}

python=("${PYTHON:-python3}")
if [[ $wheels ]]; then
  part wheels 60 "${python[@]}" -m pip install -q --no-index --no-deps --no-compile \
    --no-cache-dir --upgrade --target "$work/site" "$wheels"/*.whl
fi
cd "$benchmarks" || exit 2
part card 45 "${python[@]}" -m card.about --device "$device" --json "$out/card.json"
part readme 75 "${python[@]}" -m card.blocks --device "$device" \
  --json "$out/readme.json"
cd "$root" || exit 2
needs_card=1 signal=INT lines=25 part tests 110 "${python[@]}" -m pytest -m gpu \
  tests/gpu -v -n 7 --dist loadgroup --no-loadscope-reorder --tb=short \
  -p no:cacheprovider -p no:benchmark -o faulthandler_timeout=45 \
  --durations=8 -rfE
cd "$benchmarks" || exit 2
[[ $device == cpu ]] && quick=(--rounds 2) || quick=()
pairs() {
  local limit=$(($2 * slower)) left=$((seconds - SECONDS))
  ((limit < left)) || limit=$left
  lines=40 part "$1" "$2" "${python[@]}" gpu.py --device "$device" --only "$3" \
    --limit $((limit > 30 ? limit - 20 : limit)) --card "$out/card.json" \
    --json "$out/gpu.json" --add "${quick[@]}"
}
pairs pairs 120 eager
part state 40 "${python[@]}" -m card.first_state --device "$device" \
  --json "$out/first_state.json"
pairs compiled 150 compiled
printf '\n'
cat "$summary"
exit "$failed"
