#!/usr/bin/env bash
# llama-3.1-8b on 8 of 8 GPUs: TP 1 × PP 1 × DP 8 · micro-batch 1 × 64
# exported by planner 0.1.0 for Megatron-LM core 0.20.0; plan f03e02f251afb5f7
# 38,291 steps: 161B tokens, 20 for each active parameter, since the plan states none (--tokens)
# optimizer and learning rate: The Llama 3 Herd of Models (arXiv:2407.21783), Table 3; warm-up and end as for 405B in section 3.4.1
# first run: MOCK=1 bash launch.sh takes 20 steps, without DATA_PATH, TOKENIZER, CHECKPOINTS, and prints what the plan promises
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
# ---- fill in here, or set before the start ----
MEGATRON_PATH="${MEGATRON_PATH:-$PWD}"  # checkout of Megatron-LM
DATA_PATH="${DATA_PATH:-}"  # prefix of the tokenized data (PREFIX.bin and .idx), or weights and prefixes in turn
TOKENIZER="${TOKENIZER:-}"  # folder of the model's tokenizer, or its name at Hugging Face
CHECKPOINTS="${CHECKPOINTS:-}"  # folder for checkpoints, which all nodes share
export MEGATRON_PATH DATA_PATH TOKENIZER CHECKPOINTS
# ----
if [[ -z "${MOCK:-}$DATA_PATH$TOKENIZER$CHECKPOINTS" ]]; then
  export MOCK=1
  echo 'nothing is filled in: this is a first run on random tokens (MOCK=0 insists on training)' >&2
fi

set -euo pipefail
PLAN_DIR="${PLAN_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}"

export CUDA_DEVICE_MAX_CONNECTIONS=32
export TORCH_NCCL_HIGH_PRIORITY=1
export NCCL_NVLS_ENABLE=0
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NVTE_FWD_LAYERNORM_SM_MARGIN=20
export NVTE_BWD_LAYERNORM_SM_MARGIN=20
# ranks run on the CPUs beside their GPU where torchrun (2.9 and above) and numactl can bind them
if command -v numactl >/dev/null && python3 -c 'from importlib.metadata import version; import sys; sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 9))' 2>/dev/null; then
  export NUMA_BINDING=node NCCL_IGNORE_CPU_AFFINITY=1
fi
export PYTHONPATH="$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}"
ARGUMENTS=(
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --kv-channels 128
  --group-query-attention
  --num-query-groups 8
  --position-embedding-type rope
  --max-position-embeddings 8192
  --rotary-base 500000
  --use-rope-scaling
  --rope-scaling-factor 8
  --vocab-size 128256
  --make-vocab-size-divisible-by 128
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-05
  --swiglu
  --disable-bias-linear
  --attention-dropout 0
  --hidden-dropout 0
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --seq-length 8192
  --micro-batch-size 1
  --global-batch-size 512
  --use-megatron-fsdp
  --data-parallel-sharding-strategy optim_grads
  --ckpt-format fsdp_dtensor
  --use-distributed-optimizer
  --bf16
  --recompute-granularity full
  --recompute-method block
  --recompute-num-layers 1
  --transformer-impl transformer_engine
  --attention-backend auto
  --overlap-grad-reduce
  --overlap-param-gather
  --cross-entropy-loss-fusion
  --cross-entropy-fusion-impl native
  --lr 0.0003
  --min-lr 3e-06
  --lr-warmup-iters 3829
  --lr-decay-iters 38291
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
  --adam-eps 1e-08
  --clip-grad 1
  --init-method-std 0.02
  --lr-decay-style cosine
  --log-interval 1
  --log-throughput
  --log-memory-interval 100
  --manual-gc
  --manual-gc-interval 100
  --distributed-timeout-minutes 10
  --distributed-timeout-seconds-after-init 600
)
if [[ "${MOCK:-0}" == 1 ]]; then
printf 'first run: %s\n' >&2 \
  'planned step: 49.36 s (80% interval 44.8 to 54.4), 10,622 tokens/s/GPU, 547 TFLOP/s/GPU' \
  'planned peak of torch.cuda.max_memory_allocated, GiB, every rank: 70.5' \
  'in the log: elapsed time per iteration (ms), throughput per GPU (TFLOP/s/GPU), and after 2 iterations max allocated (MB) of the first rank of each stage'
ARGUMENTS+=(
  --mock-data
  --tokenizer-type NullTokenizer
  --train-iters 20
  --eval-iters 0
)
else
# shellcheck disable=SC2206  # the words in the variable
ARGUMENTS+=(
  --train-iters 38291
  --eval-interval 556
  --eval-iters 10
  --data-path ${DATA_PATH}
  --split "99,1,0"
  --data-cache-path "${CHECKPOINTS}/data-cache"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "${TOKENIZER}"
  --save "${CHECKPOINTS}"
  --load "${CHECKPOINTS}"
  --save-interval 73
  --save-retain-interval 438
  --exit-signal-handler
  --padded-vocab-size 128256
)
fi

export PLAN_DIR MASTER_ADDR="${MASTER_ADDR:-localhost}" MASTER_PORT="${MASTER_PORT:-29500}"
[[ "${PREFLIGHT:-1}" == 0 ]] || python3 "$PLAN_DIR"/preflight.py "$@"
exec torchrun ${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"} --nnodes 1 --nproc-per-node 8 --node-rank "${NODE_RANK:-0}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$MEGATRON_PATH"/pretrain_gpt.py \
  "${ARGUMENTS[@]}" "$@"
