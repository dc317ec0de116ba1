#!/bin/bash
#SBATCH --nodes=1
TP=1   # within a node
PP=${PP:-2}
MODEL_ARGS=(
    --num-layers 16
    --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000 --vocab-size 128256
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAIN="--tensor-model-parallel-size $TP \
  --pipeline-model-parallel-size $PP \
  --micro-batch-size 2 \
  --global-batch-size 512 --seq-length 8192 --max-position-embeddings 8192 \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --bf16 --use-distributed-optimizer --lr 3e-4 --save /ckpt"
echo "starting with --tensor-model-parallel-size $TP"
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py "${MODEL_ARGS[@]}" $TRAIN
