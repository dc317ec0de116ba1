"""A Megatron-LM launch script, argument list or MODEL_ARGS YAML as a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.errors import SpecError
from planner.export.common.imported_run import Imported, names, shown
from planner.export.common.shell import Script
from planner.export.megatron.read_model import MODEL_OPTIONS, read_model

Options = dict[str, list[str]]

_IGNORED = re.compile(
    r"--(no-)?(data-|train-data|valid-data|test-data|mock-data|per-split|split$|tokenizer|tiktoken|vocab-file|merge-file"
    r"|save|load|ckpt|dist-ckpt|use-dist-ckpt|async-|auto-detect|exit-|finetune|pretrained|no-save|no-load"
    r"|use-checkpoint|override-opt|log-|logging|tensorboard|wandb|timing|profile|use-pytorch-profiler|record-memory"
    r"|eval-|train-iters|train-samples|lr|min-lr|weight-decay|adam-|clip-grad|sgd|decoupled|start-weight|end-weight"
    r"|init-method|seed|num-workers|dataloader|reset-|eod-|mmap|create-attention|distributed-backend|distributed-timeout"
    r"|manual-gc|empty-unused|check-for-nan|rerun|initial-loss|loss-scale|min-loss|hysteresis|use-mcore|use-legacy"
    r"|rotary|rope|use-rope|mscale|yarn|beta-|norm-epsilon|layernorm-epsilon|apply-layernorm|attention-softmax"
    r"|moe-router-(load|score|group|num-groups|topk-scaling|bias|dtype|pre-softmax|enable|force|fusion)|moe-aux|moe-z"
    r"|moe-grouped|moe-permute|moe-use|mtp-loss|step-batch|rampup|calculate|te-rng|high-priority|nccl|enable-exp"
    r"|deterministic|one-logger|app-tag|use-persistent|local-rank|lazy|transformer-impl|attention-dropout"
    r"|max-position|make-vocab|vocab-extra|micro-batch-size-per|bias-|masked-softmax|persist"
    r"|optimizer$|wgrad|defer|align|ddp-|use-cpu|exp-avg|main-|use-precision|fp8-amax|fp8-margin|fp8-interval"
    r"|fp8-param|fp4-param|reuse-grad"
    r"|cross-entropy-fusion|moe-flex|moe-enable-deepep|moe-deepep|moe-shared-expert-overlap|use-tp-pp)"
)
"""Options that change what is learned, written or logged, not how long a step takes."""

_LAUNCHER = re.compile(
    r"--(nproc|nnodes|node|master|rdzv|max-restarts|tee|log-dir|redirects|ntasks|gpus|kill|label|output|export|container"
    r"|mpi|cpu|job)"
)
"""Options of torchrun and srun."""

_RECOMPUTE = {"--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules"}
_SPLIT = names(
    """
    --pipeline-model-parallel-layout --num-layers-per-virtual-pipeline-stage
    --num-virtual-stages-per-pipeline-rank --decoder-first-pipeline-num-layers
    --decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    """
)
_SIZES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--micro-batch-size": "micro_batch_size",
}
_SWITCHES: dict[str, tuple[str, Any]] = {
    "--overlap-grad-reduce": ("overlap_grad_reduce", True),
    "--overlap-param-gather": ("overlap_param_gather", True),
    "--tp-comm-overlap": ("tp_comm_overlap", True),
    "--overlap-moe-expert-parallel-comm": ("ep_overlap", True),
    "--cross-entropy-loss-fusion": ("cross_entropy_fusion", True),
    "--enable-cuda-graph": ("cuda_graph", True),
    "--external-cuda-graph": ("cuda_graph", True),
    "--accumulate-allreduce-grads-in-fp32": ("fp32_grad_accum", True),
    "--grad-reduce-in-bf16": ("fp32_grad_accum", False),
    "--no-overlap-p2p-communication": ("p2p_overlap", False),
    "--use-flash-attn": ("flash_attention", True),
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
}
_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--cuda-graph-impl": ("cuda_graph", lambda value: value if value == "transformer_engine" else value != "none"),
    "--cp-comm-type": ("cp_comm_type", lambda value: {"allgather": "all_gather"}.get(value, value)),
    "--moe-token-dispatcher-type": ("dispatcher", str),
    "--attention-backend": ("flash_attention", lambda value: value not in ("unfused", "local")),
}
_READ_ELSEWHERE = names(
    """
    --global-batch-size --seq-length --sequence-parallel --expert-tensor-parallel-size
    --use-distributed-optimizer --use-megatron-fsdp --use-custom-fsdp --data-parallel-sharding-strategy
    --hidden-dropout
    --use-torch-fsdp2 --recompute-activations --num-distributed-optimizer-instances --bf16 --fp16 --fp8-format
    --fp8-recipe --fp4-format --fp4-recipe --fp8-hybrid --fp8-e4m3
    """
)


def read_megatron(script: Script) -> Imported:
    """The run that a script (or a list of arguments) starts. Raises SpecError for values that are no numbers."""
    options = options_of(script.words) or options_of([w for values in script.variables.values() for w in values])
    if "--num-layers" not in options and "--tensor-model-parallel-size" not in options:
        raise SpecError("the script passes no Megatron-LM arguments", "give the script that calls pretrain_gpt.py")
    model, parallelism = read_model(options), _parallelism(options)
    imported = Imported(
        "megatron",
        {
            "model": model,
            "num_gpus": _num_gpus(options, script),
            "gpus_per_node": _number(options, "--nproc-per-node"),
            "runtime": "megatron",
            "seq_length": _number(options, "--seq-length"),
            "global_batch_size": _number(options, "--global-batch-size"),
            "dtype": _dtype(options),
            "parallelism": parallelism,
            "features": _features(options),
        },
    )
    imported.optimizer_instances = _number(options, "--num-distributed-optimizer-instances", 1) or 1
    _complete(imported, parallelism)
    _sort_rest(options, imported)
    return imported


def options_of(words: Sequence[str]) -> Options:
    """Options and their values; of equal options the last wins. `--a=b` and torchrun's `--a_b` are read too."""
    options: Options = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word.partition("=")
            name = (
                name.replace("_", "-")
                if name.startswith(("--nproc", "--nnodes", "--node", "--master", "--rdzv"))
                else name
            )
            options[name] = [value] if equals else []
        elif name:
            options[name].append(word)
    return options


def _number(options: Mapping[str, list[str]], name: str, default: int | None = None) -> int | None:
    values = options.get(name)
    if values is None:
        return default
    try:
        return int(float(values[0]))
    except (IndexError, ValueError, OverflowError):
        raise SpecError(
            f"{name}: {shown(values)!r} is no number", "variables of the shell must be set in the script"
        ) from None


def _num_gpus(options: Options, script: Script) -> int | None:
    """GPUs that torchrun or Slurm is asked for; None where neither says."""
    per_node = _count(options.get("--nproc-per-node", [""])) or _count(
        [script.directives.get("gpus-per-node", ""), script.directives.get("gres", "").rpartition(":")[2]]
    )
    nodes = _count([value.rpartition(":")[2] for value in options.get("--nnodes", [])]) or _count(
        [script.directives.get("nodes", ""), script.directives.get("N", "")]
    )
    world = _count(script.variables.get("WORLD_SIZE", []))
    if per_node and nodes:
        return per_node * nodes
    return world or (per_node if per_node and "--nnodes" not in options else None)


def _count(values: Sequence[str]) -> int | None:
    return next((int(value) for value in values if value.isdigit() and int(value)), None)


def _dtype(options: Options) -> str:
    if "--fp4-format" in options:
        return "nvfp4"
    if "--fp8-format" in options or "--fp8-hybrid" in options or "--fp8-e4m3" in options:
        return "mxfp8" if options.get("--fp8-recipe") == ["mxfp8"] else "fp8"
    return "fp16" if "--fp16" in options else "bf16"


def _parallelism(options: Options) -> dict[str, Any]:
    layout: dict[str, Any] = {name: _number(options, option, 1) for option, name in _SIZES.items()}
    layout["sequence_parallel"] = "--sequence-parallel" in options and layout["tp"] > 1
    if "--num-experts" in options:
        layout["etp"] = _number(options, "--expert-tensor-parallel-size", layout["tp"])
    layout |= _sharding(options)
    layout |= _recompute(options)
    layout |= _stages(options, layout["pp"])
    return layout


def _sharding(options: Options) -> dict[str, Any]:
    strategies = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    if "--use-megatron-fsdp" in options or "--use-custom-fsdp" in options:
        return {"zero_stage": strategies.get(shown(options.get("--data-parallel-sharding-strategy", ["no_shard"])), 0)}
    if "--use-torch-fsdp2" in options:
        return {"zero_stage": 3}
    return {"zero_stage": 1 if "--use-distributed-optimizer" in options else 0}


def _recompute(options: Options) -> dict[str, Any]:
    mode = shown(options.get("--recompute-granularity", []))
    if not mode:
        return {"recompute": "selective"} if "--recompute-activations" in options else {}
    if mode == "selective":
        modules = options.get("--recompute-modules", ["core_attn"])
        return {
            "recompute": "selective",
            "recompute_modules": [m for word in modules for m in word.strip("[]").split()],
        }
    if options.get("--recompute-method") == ["block"]:
        return {"recompute": "full", "recompute_num_layers": _number(options, "--recompute-num-layers", 1)}
    return {"recompute": "full"}


def _stages(options: Options, pp: int) -> dict[str, Any]:
    """vpp and an uneven split, from any of the ways to say them."""
    layout = options.get("--pipeline-model-parallel-layout")
    if layout:
        return {"layout": "".join(layout), "vpp": _stages_of_layout("".join(layout)) // pp}
    num_layers = _number(options, "--num-layers", 0) or 0
    vpp = _number(options, "--num-virtual-stages-per-pipeline-rank", 1) or 1
    ends = ("--account-for-embedding-in-pipeline-split" in options, "--account-for-loss-in-pipeline-split" in options)
    per_chunk = _number(options, "--num-layers-per-virtual-pipeline-stage")
    if per_chunk:
        vpp = max(1, (num_layers + sum(ends)) // (pp * per_chunk))
    counts = _uneven(options, num_layers, pp) or (_accounted(num_layers, pp * vpp, ends) if any(ends) else None)
    return {"vpp": vpp, **({"layers_per_stage": counts} if counts else {})}


def _stages_of_layout(layout: str) -> int:
    text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text).count("|") + 1


def _uneven(options: Options, num_layers: int, pp: int) -> list[int] | None:
    """First and last stage as given, the middle ones equal."""
    first = _number(options, "--decoder-first-pipeline-num-layers")
    last = _number(options, "--decoder-last-pipeline-num-layers")
    if (first is None and last is None) or pp == 1:
        return None
    middle = pp - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if left < 0 or (middle and left % middle) or (not middle and left):
        raise SpecError(f"{left} layers are left for {middle} middle stages", "they must divide evenly")
    return [*([] if first is None else [first]), *[left // max(middle, 1)] * middle, *([] if last is None else [last])]


def _accounted(num_layers: int, num_stages: int, ends: tuple[bool, bool]) -> list[int]:
    """Embedding and loss each count as a layer of their stage."""
    each, rest = divmod(num_layers + sum(ends), num_stages)
    if rest:
        raise SpecError(
            f"{num_layers + sum(ends)} layers, embedding and loss counted, on {num_stages} stages", "uneven"
        )
    counts = [each] * num_stages
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return counts


def _features(options: Options) -> dict[str, Any]:
    features: dict[str, Any] = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    features["cross_entropy_fusion"] = "--cross-entropy-loss-fusion" in options
    features["tp_comm_overlap"] = features["ep_overlap"] = features["cuda_graph"] = False
    # Megatron-LM drops a tenth unless told otherwise
    features["dropout"] = " ".join(options.get("--hidden-dropout", ["0.1"])).strip("0.") != ""
    if "--num-experts" in options:
        features["dispatcher"] = "allgather"
    features |= {name: value for option, (name, value) in _SWITCHES.items() if option in options}
    features |= {
        name: convert(shown(options[option])) for option, (name, convert) in _VALUES.items() if option in options
    }
    return features


def _complete(imported: Imported, layout: dict[str, Any]) -> None:
    """The batch where only dp is known."""
    gpus, ranks = imported.run["num_gpus"], layout["tp"] * layout["pp"] * layout["cp"]
    if gpus is not None and gpus % ranks:
        imported.notes.append(f"the script starts {gpus} GPUs, which tp·cp·pp ({ranks}) does not divide")
        gpus = imported.run["num_gpus"] = None
    if imported.run["global_batch_size"] is None and gpus is not None:
        imported.run["global_batch_size"] = layout["micro_batch_size"] * gpus // ranks
        imported.notes.append(
            "--global-batch-size is missing: one micro-batch per data-parallel rank, as Megatron does"
        )


def _sort_rest(options: Options, imported: Imported) -> None:
    """Everything not read is either known to be harmless or listed."""
    read = {*_SIZES, *_SWITCHES, *_VALUES, *_SPLIT, *_RECOMPUTE, *_READ_ELSEWHERE, *MODEL_OPTIONS}
    for name, values in options.items():
        if name in read or _LAUNCHER.match(name):
            continue
        bucket = imported.ignored if _IGNORED.match(name) else imported.unknown
        bucket[name] = shown(values)
