#!/usr/bin/env bash
# One run on several machines over plain ssh, without a scheduler. From the root of the repository, which lies at the same
# path on every machine:
#
#   recipes/launch/ssh.sh HOST,HOST[,...] PROCESSES_PER_HOST LAUNCH_FILE SCRIPT [argument of the script ...]
#
# The launch file states the mesh (replicate x shard); its product is hosts x processes a host. Ranks are laid out group by
# group in the order of the hosts, so name those that share a fast network side by side. Keys without a password are
# needed. Variables that begin with FEDSHARD_, HF_, NCCL_, GLOO_ or OMP_ are handed on, in the command line of each machine,
# where everybody there can read them. So HF_TOKEN is not: log in on each machine (hf auth login), or set it in ACTIVATE.
#
# ACTIVATE      a file to source on each machine first, such as .venv/bin/activate
# MASTER_PORT   default 29500
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: recipes/launch/ssh.sh HOST,HOST[,...] PROCESSES_PER_HOST LAUNCH_FILE SCRIPT [argument ...]" >&2
    exit 2
fi
IFS=, read -r -a hosts <<<"$1"
num_processes=$((${#hosts[@]} * $2))
launch_file=$3
shift 3

handed_on=()
while IFS= read -r -d '' setting; do
    case $setting in
        HF_TOKEN=*) echo "HF_TOKEN is not handed on: log in on each machine (hf auth login), or set it in ACTIVATE." >&2 ;;
        FEDSHARD_* | HF_* | NCCL_* | GLOO_* | OMP_*) handed_on+=("$setting") ;;
    esac
done < <(env -0)

quoted() { printf '%q ' "$@"; }

pids=()
# Whatever ends this script ends all: ssh -tt hangs up on the remote launcher, which ends its processes.
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM
for rank in "${!hosts[@]}"; do
    command="cd $(quoted "$PWD")&& "
    if [ -n "${ACTIVATE:-}" ]; then command+="source $(quoted "$ACTIVATE")&& "; fi
    command+="exec env $(quoted ${handed_on[@]+"${handed_on[@]}"} accelerate launch --config_file "$launch_file" \
        --num_machines "${#hosts[@]}" --num_processes "$num_processes" --machine_rank "$rank" \
        --main_process_ip "${hosts[0]}" --main_process_port "${MASTER_PORT:-29500}" "$@")"
    ssh -tt -o BatchMode=yes "${hosts[$rank]}" "$command" > >(sed -u "s/^/[${hosts[$rank]}] /") 2>&1 </dev/null &
    pids+=($!)
done

# The first machine that fails ends the others, which would otherwise wait for their next collective's timeout.
# By number: without, `wait -n` is content with the end of a `sed` above too, and a machine that is done early would end
# the others. It complains of numbers that it has waited for already.
for _ in "${hosts[@]}"; do
    wait -n "${pids[@]}" 2>/dev/null
done
