#!/usr/bin/env bash
# Start train.py on all ranks of this node, alone or as one of several nodes.
set -euo pipefail
trap '' USR1 USR2 # a scheduler's warnings; launch/agent.py handles them once it runs

usage() {
    cat <<'TEXT'
Usage: bash launch/torchrun.sh [OPTION]... [--] [KEY=VALUE]...

Starts train.py with torchrun on this node; the same command on every node, with its own --node-rank, starts the job.
Arguments after the options are config overrides; their relative paths start at the current folder. Run launch/setup.sh first.

  --ranks-per-node N   ranks on each node (default: its GPUs, or 1 without one)
  --num-nodes N        nodes in the job (default: 1); with MIN:MAX it starts half a minute after node MIN has joined,
                       and restarts when a node leaves or joins (needs training.elastic=true)
  --node-rank R        0 on the node that --master-addr names, another number below --num-nodes on each other (default: 0)
  --master-addr HOST   where node 0 is reached by the others (needed with several nodes)
  --master-port PORT   a free TCP port there (default: 29500)
  --job-id NAME        the same on all nodes, different from other jobs (default: mixtrain)
  --max-restarts N     how often all ranks are restarted after one fails; they resume from the newest checkpoint (default: 0)
  --min-ranks N        on one node, when the restarts are used up: continue with fewer ranks, as many as the layout allows,
                       but at least N (default: end instead)
  --log-dir FOLDER     write the output of every rank to files there, rank_00000.out, rank_00000.err and so on; rank 0 of the
                       node is shown as well (default: show all, no files)

Exit status: 0 when all steps are done; 75 when the run stopped early on purpose, with everything saved: the same command
resumes it; 2 for a wrong config, which is not restarted; else the exit status of the rank that failed first. The last line is
that of this rank. SIGTERM, SIGHUP, Ctrl-C, SIGUSR1 and SIGUSR2 make the ranks finish their step, save and stop, or end at
once before the first step; a second Ctrl-C ends them in any case.

One node listens on the loopback alone. Several nodes do not authenticate each other: see docs/guide/network.md.

Example, on the second of two nodes with 8 GPUs each:
  bash launch/torchrun.sh --num-nodes 2 --node-rank 1 --master-addr node-a -- experiment=gpt_moe_small parallel.expert=8 training.micro_batch_size=4
TEXT
}

die() {
    echo "torchrun.sh: $*" >&2
    exit 2
}

num_nodes=1
node_rank=0
master_addr=
master_port=29500
ranks_per_node=
job_id=mixtrain
max_restarts=0
min_ranks=
log_dir=

while [[ $# -gt 0 ]]; do
    option=$1
    case $option in
        -h | --help)
            usage
            exit 0
            ;;
        --)
            shift
            break
            ;;
        --num-nodes | --node-rank | --master-addr | --master-port | --ranks-per-node | --job-id | --max-restarts | --min-ranks | --log-dir)
            [[ $# -ge 2 && -n $2 ]] || die "$option needs a value; see --help"
            value=$2
            shift 2
            ;;
        -*) die "unknown option $option; see --help" ;;
        *) break ;;
    esac
    case $option in
        --num-nodes)
            [[ $value =~ ^(0|[1-9][0-9]*)(:[1-9][0-9]*)?$ ]] || die "$option=$value is neither a number nor a range such as 2:4; try $option 1"
            ;;
        --node-rank | --master-port | --ranks-per-node | --max-restarts | --min-ranks)
            [[ $value =~ ^(0|[1-9][0-9]*)$ ]] || die "$option=$value is not a whole number; try $option 1"
            ;;
    esac
    case $option in
        --num-nodes) num_nodes=$value ;;
        --node-rank) node_rank=$value ;;
        --master-addr) master_addr=$value ;;
        --master-port) master_port=$value ;;
        --ranks-per-node) ranks_per_node=$value ;;
        --job-id) job_id=$value ;;
        --max-restarts) max_restarts=$value ;;
        --min-ranks) min_ranks=$value ;;
        --log-dir) log_dir=$(realpath -m "$value") ;;
    esac
done

least_nodes=${num_nodes%:*}
max_nodes=${num_nodes#*:}
((least_nodes <= max_nodes)) || die "--num-nodes=$num_nodes must go from fewer to more nodes; try --num-nodes $max_nodes:$least_nodes"
((least_nodes > 0)) || die "--num-nodes=$num_nodes must be at least 1"
((node_rank < max_nodes)) || die "--node-rank=$node_rank must be below --num-nodes=$num_nodes; try --node-rank $((max_nodes - 1))"
((max_nodes == 1)) || [[ -n $master_addr ]] || die "--num-nodes=$num_nodes needs --master-addr, the host name of node 0"
((max_nodes == 1)) || [[ -z $min_ranks ]] || die "--min-ranks=$min_ranks works on one node only; leave it out"

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ -x $root/.venv/bin/python ]] || die "there is no .venv in $root; run bash launch/setup.sh there first"
# Relative paths are the caller's; modules are found here, whatever folders the caller's directory has.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

if [[ -z $ranks_per_node ]]; then
    gpus=$(bash "$root/launch/count_gpus.sh")
    ranks_per_node=$((gpus > 0 ? gpus : 1))
fi
((ranks_per_node > 0)) || die "--ranks-per-node=$ranks_per_node must be at least 1"
if [[ -n $min_ranks ]] && ((min_ranks < 1 || min_ranks > ranks_per_node)); then
    die "--min-ranks=$min_ranks must be between 1 and --ranks-per-node=$ranks_per_node; try --min-ranks 1"
fi

arguments=(--nproc-per-node "$ranks_per_node" --max-restarts "$max_restarts")
if ((max_nodes == 1)); then
    arguments+=(--standalone)
else
    # The c10d rendezvous lets all nodes restart together. It numbers the nodes itself; --node-rank only decides the host.
    is_host=$([[ $node_rank == 0 ]] && echo 1 || echo 0)
    arguments+=(--nnodes "$num_nodes" --rdzv-backend c10d --rdzv-id "$job_id" --rdzv-endpoint "$master_addr:$master_port")
    arguments+=(--rdzv-conf "is_host=$is_host,join_timeout=600")
fi
if [[ -n $log_dir ]]; then
    mkdir -p "$log_dir"
    arguments+=(--log-dir "$log_dir")
fi
[[ -z $min_ranks ]] || arguments+=(--min-ranks "$min_ranks")

cores=$(env -u OMP_NUM_THREADS nproc)
threads=$((cores / ranks_per_node))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
exec "$root/.venv/bin/python" -m launch.agent "${arguments[@]}" -- "$@"
