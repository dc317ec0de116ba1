"""Options of Megatron-LM that are not read: those known to change neither seconds nor bytes of a step, and others."""

from __future__ import annotations

import re
from collections.abc import Collection

from planner.export.common.imported_run import ImportedRun
from planner.export.megatron.options import Options

_HARMLESS = """
    data- train-data valid-data test-data mock-data per-split split$ tokenizer tiktoken vocab-file merge-file
    save load ckpt dist-ckpt use-dist-ckpt async- auto-detect exit- finetune pretrained no-save no-load
    use-checkpoint override-opt log- logging tensorboard wandb timing profile use-pytorch-profiler record-memory
    eval- train-iters train-samples lr min-lr weight-decay adam- clip-grad sgd decoupled start-weight end-weight
    init-method seed num-workers dataloader reset- eod- mmap create-attention distributed-backend
    distributed-timeout manual-gc empty-unused check-for-nan rerun cuda-graph-warmup overlap-cpu initial-loss
    loss-scale min-loss hysteresis use-mcore use-legacy rotary rope use-rope mscale yarn beta- norm-epsilon
    layernorm-epsilon apply-layernorm attention-softmax
    moe-router-(load|score|group|num-groups|topk-scaling|bias|dtype|pre-softmax|enable|force|fusion) moe-aux
    moe-z moe-grouped moe-permute moe-use mtp-loss step-batch rampup calculate te-rng high-priority nccl
    enable-exp one-logger app-tag use-persistent local-rank lazy transformer-impl attention-dropout max-position
    make-vocab padded-vocab vocab-extra micro-batch-size-per bias- masked-softmax persist align ddp-
    use-cpu-init fp8-amax fp8-margin fp8-interval fp8-param fp4-param reuse-grad fine-grained-offloading-max
    moe-(flex-dispatcher-num|hybridep|deepep|paged-stash|expert-rank-capacity|pad-expert|single-grouped)
    apply-query-key no-query-key inference- rl- grpo- langrl- perform-rl flash-decode incoming-requests prompts
    num-tokens-to-gen temperature top- top_ return-log max-tokens-to-oom enable-chunked straggler
    check-weight-hash verify-integrity train-tokens train-weighted valid-weighted test-weighted valid-num
    abort-on kill-switch sync-tp-dup norm-target loss-on-targets universal-checkpoint codecarbon skip-train
    moe-loss moe-layer-recompute$ synchronize-each contigious zero-(reduce|allgather|contig) repeated-dataloader
    DDP-impl memory-centric return-data create-moe num-dataset recompute-method$ apply-wd warmup$ dist-url
    use-ring-exchange pipeline-model-parallel-comm sft model-type legacy-tokenizer trust-remote delay-load
"""
_IGNORED = re.compile(rf"--(no-)?({'|'.join(_HARMLESS.split())})")
"""Options that change what is learned, written or logged, not how long a step takes."""

_OF_LAUNCHERS = """
    nproc nnodes node master rdzv max-restarts tee log-dir redirects ntasks gpus kill label output export
    container mpi cpu-bind numa job num-gpus num-nodes num_ hostfile force_multi max_restarts wait$
    deepspeed_port no_local include exclude module$ nodes$ gres partition account time$ exclusive mem$ jobid
    overlap$ local-addr start-method role standalone
"""
_LAUNCHER = re.compile(rf"--({'|'.join(_OF_LAUNCHERS.split())})")
"""Options of torchrun and srun: the run says their part as a number of GPUs."""


_UNASKED = {
    "--optimizer": ("adam", "adamw"),
    "--main-grads-dtype": ("fp32",),
    "--main-params-dtype": ("fp32",),
    "--exp-avg-dtype": ("fp32",),
    "--exp-avg-sq-dtype": ("fp32",),
    "--num-experts": ("1",),
    "--moe-token-dispatcher-type": ("allgather",),
}
"""Options with the values that Megatron-LM has unasked: they say nothing new."""
_NEEDED_BY_OTHERS = {
    "--use-precision-aware-optimizer",
    "--overlap-cpu-optimizer-d2h-h2d",
    "--moe-mlp-glu-interleave-size",
}
"""Options that only let others be given."""


def sort_unread(options: Options, read: Collection[str], imported: ImportedRun) -> None:
    """Note every option that is not `read` as ignored where it is known to be harmless, else as unknown."""
    for name, values in options.items():
        if name in read or _LAUNCHER.match(name):
            continue
        is_harmless = (
            _IGNORED.match(name) or name in _NEEDED_BY_OTHERS or " ".join(values).lower() in _UNASKED.get(name, ())
        )
        (imported.ignored if is_harmless else imported.unknown)[name] = " ".join(values)
