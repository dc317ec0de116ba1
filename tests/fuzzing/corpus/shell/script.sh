
#!/bin/bash
#SBATCH --nodes=16   # of them
#SBATCH --gpus-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8; NUM_NODES=${NUM_NODES:-16}
WORLD_SIZE=$(($GPUS_PER_NODE * NUM_NODES))
CHECKPOINT=$1
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes "$NUM_NODES" --node_rank "$NODE_RANK")
MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192     # Llama
    --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope
    "--vocab-size 128256"
)
if [[ -n "$FP8" ]]; then
  MODEL_ARGS+=(--fp8-format hybrid)
fi
PARALLEL="--tensor-model-parallel-size 4 --sequence-parallel \
  --pipeline-model-parallel-size 4"
PARALLEL="$PARALLEL --pipeline-model-parallel-layout 'Et*19|(t*20|)*2t*21L'"
srun --label bash -c "torchrun ${DISTRIBUTED_ARGS[*]} pretrain_gpt.py \
    ${MODEL_ARGS[*]} $PARALLEL --micro-batch-size 1 --global-batch-size 512 --seq-length 4096 \
    --use-distributed-optimizer --bf16 --recompute-granularity full --recompute-method block \
    --recompute-num-layers 3 --save $CHECKPOINT --brand-new-switch 7 --lr 1e-4"
