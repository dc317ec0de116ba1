#!/usr/bin/env bash
# llama-3.1-8b on 8 of 8 GPUs: TP 1 × PP 1 × DP 8 · micro-batch 1 × 64
# exported by planner 0.1.0 for torchtitan 0.3.0 and main of August 2026; plan f03e02f251afb5f7
# 38,291 steps: 161B tokens, 20 for each active parameter, since the plan states none (--tokens)
# optimizer and learning rate: The Llama 3 Herd of Models (arXiv:2407.21783), Table 3; warm-up and end as for 405B in section 3.4.1
# initial weights are drawn with a plain std of 0.02
# priced for torchtitan: 55.09 s a step, 68.4 of 79.1 GiB; planned for megatron: 49.36 s, 73.9 of 79.1 GiB, with overlap_grad_reduce=true, overlap_param_gather=true, cross_entropy_fusion=native
# first run: MOCK=1 bash launch.sh takes 20 steps, without DATA_PATH, CHECKPOINTS, and prints what the plan promises
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
# ---- fill in here, or set before the start ----
HF_ASSETS_PATH="${HF_ASSETS_PATH:-./tests/assets/tokenizer}"  # folder with the model's tokenizer.json
DATA_PATH="${DATA_PATH:-}"  # data set at Hugging Face, or a folder in its format, with a column `text`
CHECKPOINTS="${CHECKPOINTS:-}"  # folder for checkpoints, which all nodes share
export HF_ASSETS_PATH DATA_PATH CHECKPOINTS
# ----
if [[ -z "${MOCK:-}$DATA_PATH$CHECKPOINTS" ]]; then
  export MOCK=1
  echo 'nothing is filled in: this is a first run on random tokens (MOCK=0 insists on training)' >&2
fi

set -euo pipefail
PLAN_DIR="${PLAN_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}"

export PYTORCH_ALLOC_CONF=expandable_segments:True
export TORCH_NCCL_HIGH_PRIORITY=1
# ranks run on the CPUs beside their GPU where torchrun (2.9 and above) and numactl can bind them
if command -v numactl >/dev/null && python3 -c 'from importlib.metadata import version; import sys; sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 9))' 2>/dev/null; then
  export NUMA_BINDING=node NCCL_IGNORE_CPU_AFFINITY=1
fi
export MOCK="${MOCK:-0}" PYTHONPATH="$PLAN_DIR${PYTHONPATH:+:$PYTHONPATH}"
ARGUMENTS=(
  --module planned_recipe
  --config plan
)
if [[ "${MOCK:-0}" == 1 ]]; then
printf 'first run: %s\n' >&2 \
  'planned step: 55.09 s (80% interval 50 to 60.7), 9,517 tokens/s/GPU, 490 TFLOP/s/GPU' \
  'planned peak of torch.cuda.max_memory_allocated, GiB, every rank: 65.2' \
  'in the log: tps (tokens/s/GPU) and memory (GiB, max_memory_reserved) of each rank'
fi

export PLAN_DIR MASTER_ADDR="${MASTER_ADDR:-localhost}" MASTER_PORT="${MASTER_PORT:-29500}"
[[ "${PREFLIGHT:-1}" == 0 ]] || python3 "$PLAN_DIR"/preflight.py "$@"
exec torchrun ${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"} --nnodes 1 --nproc-per-node 8 --node-rank "${NODE_RANK:-0}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m torchtitan.train \
  "${ARGUMENTS[@]}" "$@"
