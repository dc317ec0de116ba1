#!/usr/bin/env bash
# qwen3-30b-a3b on 16 of 16 GPUs: TP 1 × PP 1 × DP 16 × EP 16 · micro-batch 1 × 64
# exported by planner 0.1.0 for Megatron-LM core 0.20.0; plan 3421396f443e2581
# 15,989 steps: 67.1B tokens, 20 for each active parameter, since the plan states none (--tokens)
# optimizer and learning rate: defaults for models of this size, none is published
# first run: MOCK=1 bash launch.sh takes 20 steps, without DATA_PATH, TOKENIZER, CHECKPOINTS, and prints what the plan promises
# run on each of 2 nodes with NODE_RANK=0..1 and MASTER_ADDR
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
export NCCL_GRAPH_REGISTER=0
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NVTE_FWD_LAYERNORM_SM_MARGIN=20
export NVTE_BWD_LAYERNORM_SM_MARGIN=20
export NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=8
export NVLINK_DOMAIN_SIZE=8
export USE_MNNVL=0
# ranks run on the CPUs beside their GPU where torchrun (2.9 and above) and numactl can bind them
if command -v numactl >/dev/null && python3 -c 'from importlib.metadata import version; import sys; sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 9))' 2>/dev/null; then
  export NUMA_BINDING=node NCCL_IGNORE_CPU_AFFINITY=1
fi
export PYTHONPATH="$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}"
ARGUMENTS=(
  --num-layers 48
  --hidden-size 2048
  --ffn-hidden-size 768
  --num-attention-heads 32
  --kv-channels 128
  --group-query-attention
  --num-query-groups 4
  --position-embedding-type rope
  --max-position-embeddings 4096
  --rotary-base 1000000
  --vocab-size 151936
  --make-vocab-size-divisible-by 128
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-06
  --qk-layernorm
  --swiglu
  --disable-bias-linear
  --num-experts 128
  --moe-ffn-hidden-size 768
  --moe-layer-freq 1
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-topk 8
  --moe-router-dtype fp32
  --moe-router-score-function softmax
  --moe-router-load-balancing-type aux_loss
  --moe-aux-loss-coeff 0.001
  --attention-dropout 0
  --hidden-dropout 0
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 16
  --expert-tensor-parallel-size 1
  --seq-length 4096
  --micro-batch-size 1
  --global-batch-size 1024
  --use-distributed-optimizer
  --ddp-bucket-size 134217728
  --bf16
  --transformer-impl transformer_engine
  --attention-backend auto
  --overlap-moe-expert-parallel-comm
  --cuda-graph-impl transformer_engine
  --cuda-graph-modules attn moe_router moe_preprocess
  --moe-token-dispatcher-type flex
  --moe-flex-dispatcher-backend hybridep
  --overlap-grad-reduce
  --overlap-param-gather
  --cross-entropy-loss-fusion
  --cross-entropy-fusion-impl native
  --lr 0.0003
  --min-lr 3e-05
  --lr-warmup-iters 1598
  --lr-decay-iters 15989
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
  'planned step: 19.61 s (80% interval 15.9 to 24.3), 13,365 tokens/s/GPU, 308 TFLOP/s/GPU' \
  'planned peak of torch.cuda.max_memory_allocated, GiB, every rank: 66.3' \
  'in the log: elapsed time per iteration (ms), throughput per GPU (TFLOP/s/GPU), and after 2 iterations max allocated (MB) of the first rank of each stage'
ARGUMENTS+=(
  --mock-data
  --tokenizer-type NullTokenizer
  --train-iters 20
  --eval-iters 0
  --moe-router-force-load-balancing
)
else
# shellcheck disable=SC2206  # the words in the variable
ARGUMENTS+=(
  --train-iters 15989
  --eval-interval 556
  --eval-iters 10
  --data-path ${DATA_PATH}
  --split "99,1,0"
  --data-cache-path "${CHECKPOINTS}/data-cache"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "${TOKENIZER}"
  --save "${CHECKPOINTS}"
  --load "${CHECKPOINTS}"
  --save-interval 184
  --save-retain-interval 1104
  --exit-signal-handler
  --ckpt-format torch_dist
  --async-save
  --use-persistent-ckpt-worker
  --async-strategy mcore
  --padded-vocab-size 151936
)
fi

export PLAN_DIR MASTER_ADDR="${MASTER_ADDR:-localhost}" MASTER_PORT="${MASTER_PORT:-29500}"
[[ "${PREFLIGHT:-1}" == 0 ]] || python3 "$PLAN_DIR"/preflight.py "$@"
exec torchrun ${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"} --nnodes 2 --nproc-per-node 8 --node-rank "${NODE_RANK:-0}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$MEGATRON_PATH"/pretrain_gpt.py \
  "${ARGUMENTS[@]}" "$@"
