"""Options that Megatron-LM refuses before its first step, beside the rules of shapes and recipes: a row for each.

The rows are those of core/transformer/transformer_config.py and core/optimizer as of August 2026, which every trainer
on Megatron core runs, and of megatron/training/arguments.py (validate_args), which those alone run that are started by
its options. Options that build fewer layers than the model has are no price at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from planner.errors import SpecError
from planner.export.megatron.option_rows import Options, number, text

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_VPP, _PER_STAGE = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
_LAYOUT, _ENDS = "--pipeline-model-parallel-layout", ("--account-for-embedding-in-pipeline-split",
                                                      "--account-for-loss-in-pipeline-split")  # fmt: skip
_FSDP = "--use-megatron-fsdp"


class StatedOptions:
    """Options as the rows ask for them."""

    def __init__(self, options: Options, environment: Mapping[str, Sequence[str]] = {}) -> None:
        self.options, self.environment = options, environment
        self.layers, self.pp = self.number("--num-layers", 0), max(1, self.number("--pipeline-model-parallel-size", 1))
        self.first, self.last = number(options, FIRST), number(options, LAST)
        self.counted = self.layers + sum(name in options for name in _ENDS)
        """Layers, with embedding and loss where each counts as one."""

    def number(self, name: str, default: int) -> int:
        value = number(self.options, name, default)
        return default if value is None else value

    @property
    def has_ends(self) -> bool:
        """Layers of the first or the last stage are given."""
        return self.first is not None or self.last is not None

    def has(self, *names: str) -> bool:
        return all(name in self.options for name in names)

    def says(self, name: str, *values: str) -> bool:
        return text(self.options, name) in values

    @property
    def vpp(self) -> int:
        return max(1, self.number(_VPP, 1))

    @property
    def is_given(self) -> bool:
        """True where the split is given otherwise than by equal stages."""
        return self.has(_LAYOUT) or self.has_ends

    @property
    def middle(self) -> tuple[int, int]:
        """Layers and stages between the first and the last, where these are given."""
        stages = self.pp - (self.first is not None) - (self.last is not None)
        return self.layers - (self.first or 0) - (self.last or 0), stages

    @property
    def modules(self) -> list[str]:
        return [m for word in self.options.get("--recompute-modules", []) for m in word.strip("[]").split(",")]


class Refusal(NamedTuple):
    """One check of the trainer."""

    name: str
    is_broken: Callable[[StatedOptions], object]
    says: Callable[[StatedOptions], str]
    of_parser: bool = False
    """True where arguments.py alone refuses it, which Megatron-Bridge and others do not run."""
    loses_layers: bool = False
    """True where an older version went on with fewer layers than the model has."""


def _text(words: str) -> Callable[[StatedOptions], str]:
    return lambda o: words


def _uneven_middle(o: StatedOptions) -> bool:
    layers, stages = o.middle
    return o.has_ends and bool(stages) and layers % stages != 0


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "layers_per_stage",
        lambda o: o.layers and not o.is_given and not o.has(_PER_STAGE) and o.counted % o.pp,
        lambda o: f"{o.counted} layers are no multiple of the {o.pp} pipeline stages",
    ),
    Refusal(
        "layers_per_virtual_stage",
        lambda o: o.layers and not o.is_given and not o.counted % o.pp and (o.counted // o.pp) % o.vpp,
        lambda o: f"{o.counted // o.pp} layers of a stage are no multiple of its {o.vpp} virtual stages",
    ),
    Refusal(
        "layers_of_virtual_stage",
        lambda o: o.layers and o.has(_PER_STAGE)
        and (o.counted % o.pp or (o.counted // o.pp) % max(1, o.number(_PER_STAGE, 1))),
        lambda o: (
            f"{o.counted} layers on {o.pp} stages are no multiple of {o.number(_PER_STAGE, 1)} a virtual stage"
        ),
        of_parser=True,
    ),
    Refusal(
        "ends_without_pipeline",
        lambda o: o.has_ends and o.pp == 1,
        lambda o: (
            f"{FIRST if o.first is not None else LAST} without a pipeline builds {o.first or o.last} of "
            f"{o.layers or 'all'} layers"
        ),
        loses_layers=True,
    ),
    Refusal(
        "empty_end",
        lambda o: (o.first is not None and o.first < 1) or (o.last is not None and o.last < 1),
        _text("the first and the last stage need a layer, where their layers are given"),
    ),
    Refusal(
        "no_middle",
        lambda o: o.layers and o.pp > 1 and o.has_ends
        and (o.middle[0] < 0 or bool(o.middle[0]) != bool(o.middle[1])),
        lambda o: f"{o.middle[0]} layers are left for {o.middle[1]} middle stages",
        loses_layers=True,
    ),
    Refusal(
        "middle_layers",
        lambda o: o.layers and o.pp > 1 and _uneven_middle(o),
        lambda o: f"{o.middle[0]} layers are no multiple of the {o.middle[1]} middle stages",
    ),
    Refusal(
        "virtual_stages_of_ends",
        lambda o: o.vpp > 1 and any(count is not None and count % o.vpp for count in (o.first, o.last)),
        lambda o: f"layers of the first and the last stage must be multiples of the {o.vpp} virtual stages",
    ),
    Refusal(
        "virtual_stages_of_middle",
        lambda o: o.layers and o.vpp > 1 and o.pp > 2 and o.has_ends
        and o.middle[1] > 0 and not o.middle[0] % o.middle[1] and (o.middle[0] // o.middle[1]) % o.vpp,
        lambda o: f"{o.middle[0] // o.middle[1]} layers of a middle stage are no multiple of {o.vpp} virtual stages",
    ),
    Refusal(
        "ends_given_twice",
        lambda o: o.has_ends and any(o.has(name) for name in _ENDS),
        _text("layers of the first or last stage are given, and embedding or loss count as layers, too"),
    ),
    Refusal(
        "layout_given_twice",
        lambda o: o.has(_LAYOUT) and (o.has_ends or any(o.has(n) for n in _ENDS)),
        _text(f"{_LAYOUT} stands beside other options of the split"),
    ),
    Refusal(
        "virtual_stages_given_twice",
        lambda o: sum(o.has(name) for name in (_VPP, _PER_STAGE, _LAYOUT)) > 1,
        _text(f"no more than one of {_VPP}, {_PER_STAGE} and {_LAYOUT} can be given"),
        of_parser=True,
    ),
    Refusal(
        "per_stage_beside_ends",
        lambda o: o.has(_PER_STAGE) and o.has_ends,
        _text(f"{_PER_STAGE} beside layers of the first or last stage: {_VPP} says it"),
        of_parser=True,
    ),
    Refusal(
        "full_without_method",
        lambda o: o.says("--recompute-granularity", "full") and not o.has("--recompute-method"),
        _text("--recompute-granularity full needs --recompute-method"),
    ),
    Refusal(
        "full_without_layers",
        lambda o: o.says("--recompute-granularity", "full") and not o.has("--recompute-num-layers"),
        _text("--recompute-granularity full needs --recompute-num-layers"),
    ),
    Refusal(
        "selective_with_method",
        lambda o: o.says("--recompute-granularity", "selective")
        and (o.has("--recompute-method") or o.has("--recompute-num-layers")),
        _text("--recompute-granularity selective takes no --recompute-method and no --recompute-num-layers"),
    ),
    Refusal(
        "moe_act_without_grouped",
        lambda o: o.says("--recompute-granularity", "selective") and "moe_act" in o.modules
        and o.has("--hidden-size") and not o.has("--moe-grouped-gemm"),
        _text("moe_act in --recompute-modules needs --moe-grouped-gemm"),
    ),
    Refusal(
        "gather_without_reduce",
        lambda o: o.has("--overlap-param-gather") and not o.has("--overlap-grad-reduce"),
        _text("--overlap-param-gather needs --overlap-grad-reduce"),
        of_parser=True,
    ),
    Refusal(
        "gather_without_shards",
        lambda o: o.has("--overlap-param-gather") and not o.has("--use-distributed-optimizer") and not o.has(_FSDP)
        and not o.says("--optimizer", "dist_muon"),
        _text("--overlap-param-gather needs --use-distributed-optimizer or Megatron-FSDP"),
        of_parser=True,
    ),
    Refusal(
        "torch_fsdp",
        lambda o: o.has("--use-torch-fsdp2")
        and (o.pp > 1 or o.number("--expert-model-parallel-size", 1) > 1 or o.has("--use-distributed-optimizer")
             or o.has("--fp16")),
        _text("--use-torch-fsdp2 takes no pipeline, no expert parallelism, no distributed optimizer and no fp16"),
        of_parser=True,
    ),
    Refusal(
        "fsdp_optimizer",
        lambda o: o.has(_FSDP) and o.has("--optimizer") and not o.says("--optimizer", "adam", "sgd"),
        _text("Megatron-FSDP takes adam or sgd"),
        of_parser=True,
    ),
    Refusal(
        "fsdp_format",
        lambda o: o.has(_FSDP, "--ckpt-format") and not o.says("--ckpt-format", "fsdp_dtensor"),
        _text(f"{_FSDP} needs --ckpt-format fsdp_dtensor"),
    ),
    Refusal("fp16_and_bf16", lambda o: o.has("--fp16", "--bf16"), _text("--fp16 and --bf16 exclude each other")),
    Refusal(
        "fp4_and_fp8", lambda o: o.has("--fp4-format", "--fp8-format"),
        _text("--fp4-format and --fp8-format exclude each other"),
    ),
    Refusal(
        "precision_aware_without_shards",
        lambda o: o.has("--use-precision-aware-optimizer") and not o.has("--use-distributed-optimizer")
        and not o.has(_FSDP),
        _text("--use-precision-aware-optimizer needs --use-distributed-optimizer"),
    ),
    Refusal(
        "offload_without_shards",
        lambda o: o.has("--optimizer-cpu-offload") and not o.has("--use-precision-aware-optimizer"),
        _text("--optimizer-cpu-offload needs --use-precision-aware-optimizer"),
        of_parser=True,
    ),
    Refusal(
        "offload_with_pipeline",
        lambda o: o.has("--cpu-offloading-num-layers") and (o.pp > 1 or o.has("--recompute-granularity")),
        _text("--cpu-offloading-num-layers takes no pipeline and no recomputation"),
    ),
    Refusal(
        "overlap_without_sequence_parallel",
        lambda o: o.has("--tp-comm-overlap") and not o.has("--sequence-parallel"),
        _text("--tp-comm-overlap needs --sequence-parallel"),
        of_parser=True,
    ),
    Refusal(
        "flex_without_backend",
        lambda o: o.has("--moe-enable-deepep") and not o.says("--moe-token-dispatcher-type", "flex"),
        _text("--moe-enable-deepep needs --moe-token-dispatcher-type flex"),
    ),
    Refusal(
        "shared_overlap_with_allgather",
        lambda o: o.has("--moe-shared-expert-overlap", "--moe-shared-expert-intermediate-size")
        and not o.says("--moe-token-dispatcher-type", "alltoall", "flex"),
        _text("--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall or flex"),
    ),
    Refusal(
        "top_1_after_softmax",
        lambda o: o.says("--moe-router-topk", "1") and not o.has("--moe-router-pre-softmax")
        and not o.says("--moe-router-score-function", "sigmoid", "sqrtsoftplus")
        and not o.says("--moe-router-load-balancing-type", "sinkhorn"),
        _text("--moe-router-topk 1 needs --moe-router-pre-softmax"),
    ),
    Refusal(
        "bias_of_split_experts",
        lambda o: o.number("--num-experts", 1) > 1 and o.has("--hidden-size") and not o.has("--disable-bias-linear")
        and o.number("--expert-tensor-parallel-size", o.number("--tensor-model-parallel-size", 1)) > 1,
        _text("experts with biases need --expert-tensor-parallel-size 1, or --disable-bias-linear"),
    ),
    Refusal(
        "experts_of_none",
        lambda o: o.number("--expert-model-parallel-size", 1) > 1 and o.has("--hidden-size")
        and not o.has("--num-experts"),
        _text("--expert-model-parallel-size needs --num-experts"),
    ),
    Refusal(
        "capacity_with_balancing",
        lambda o: o.number("--moe-expert-capacity-factor", -1) >= 0 and o.has("--moe-router-load-balancing-type")
        and not o.says("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        _text("--moe-expert-capacity-factor takes a load balancing by an auxiliary loss, or none"),
    ),
    Refusal(
        "padded_capacity_with_flex",
        lambda o: o.has("--moe-pad-expert-input-to-capacity") and o.says("--moe-token-dispatcher-type", "flex")
        and not o.says("--moe-flex-dispatcher-backend", "hybridep", "ncclep"),
        _text("--moe-token-dispatcher-type flex takes no --moe-pad-expert-input-to-capacity"),
    ),
    Refusal(
        "shared_experts_recomputed",
        lambda o: "shared_experts" in o.modules and o.has("--moe-shared-expert-overlap"),
        _text("shared_experts in --recompute-modules does not go with --moe-shared-expert-overlap"),
    ),
    Refusal(
        "latent_projection_of_none",
        lambda o: "mla_up_proj" in o.modules and o.has("--hidden-size") and not o.has("--multi-latent-attention"),
        _text("mla_up_proj in --recompute-modules needs --multi-latent-attention"),
    ),
    Refusal(
        "delayed_scales_recomputed",
        lambda o: o.has("--fp8-format") and o.says("--fp8-recipe", "delayed", "")
        and any(module in o.modules for module in ("moe_act", "layernorm")),
        _text("--fp8-recipe delayed takes no moe_act and no layernorm in --recompute-modules"),
    ),
    Refusal(
        "moe_recomputed_twice",
        lambda o: o.has("--moe-layer-recompute") and o.says("--recompute-granularity", "full"),
        _text("--moe-layer-recompute does not go with --recompute-granularity full"),
    ),
    Refusal(
        "narrow_weights_alone",
        lambda o: o.has("--fp8-param-gather") and not o.has("--fp8-format"),
        _text("--fp8-param-gather needs --fp8-format"),
    ),
    Refusal(
        "narrow_weights_without_shards",
        lambda o: o.has("--fp8-param-gather")
        and not any(o.has(name) for name in ("--use-distributed-optimizer", "--use-torch-fsdp2", _FSDP)),
        _text("--fp8-param-gather needs --use-distributed-optimizer or FSDP"),
        of_parser=True,
    ),
    Refusal(
        "fsdp_connections",
        lambda o: (o.has(_FSDP) or o.has("--use-torch-fsdp2"))
        and "1" in o.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", ()),
        _text("FSDP takes no CUDA_DEVICE_MAX_CONNECTIONS=1"),
        of_parser=True,
    ),
    Refusal(
        "graph_with_checks",
        lambda o: o.says("--cuda-graph-impl", "full_iteration") and not o.has("--no-check-for-nan-in-loss-and-grad"),
        _text("--cuda-graph-impl full_iteration needs --no-check-for-nan-in-loss-and-grad"),
        of_parser=True,
    ),
    Refusal(
        "padded_capacity",
        lambda o: o.has("--moe-pad-expert-input-to-capacity") and not o.has("--moe-expert-capacity-factor"),
        _text("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"),
    ),
    Refusal(
        "positions_below_sequence",
        lambda o: o.has("--max-position-embeddings", "--seq-length")
        and o.number("--max-position-embeddings", 0) < o.number("--seq-length", 0),
        lambda o: (
            f"--max-position-embeddings {o.number('--max-position-embeddings', 0)} is below --seq-length "
            f"{o.number('--seq-length', 0)}"
        ),
        of_parser=True,
    ),
    Refusal(
        "graph_given_twice",
        lambda o: o.has("--cuda-graph-scope", "--cuda-graph-modules")
        or o.has("--enable-cuda-graph", "--external-cuda-graph"),
        _text("--cuda-graph-scope and --cuda-graph-modules, or two kinds of graphs, exclude each other"),
    ),
    Refusal(
        "group_sizes",
        lambda o: o.has("--num-query-groups", "--num-attention-heads", "--group-query-attention")
        and o.number("--num-attention-heads", 1) % max(1, o.number("--num-query-groups", 1)),
        lambda o: (
            f"{o.number('--num-attention-heads', 1)} heads are no multiple of "
            f"{o.number('--num-query-groups', 1)} groups"
        ),
    ),
    Refusal(
        "heads_without_channels",
        lambda o: o.has("--hidden-size", "--num-attention-heads") and not o.has("--kv-channels")
        and o.number("--hidden-size", 0) % max(1, o.number("--num-attention-heads", 1)),
        lambda o: (
            f"hidden size {o.number('--hidden-size', 0)} is no multiple of {o.number('--num-attention-heads', 1)} heads"
        ),
        of_parser=True,
    ),
)  # fmt: skip


def refusals(options: Options, is_parsed: bool = True, environment: Mapping[str, Sequence[str]] = {}) -> list[str]:
    """Why the trainer ends before its first step; `is_parsed` where Megatron-LM's own parser takes the options.

    Raises SpecError where it would build fewer layers than there are.
    """
    stated = StatedOptions(options, environment)
    found = [row for row in REFUSALS if (is_parsed or not row.of_parser) and row.is_broken(stated)]
    lost = next((row for row in found if row.loses_layers), None)
    if lost is not None:
        raise SpecError(lost.says(stated), "give the pipeline that these layers are for, or leave them out")
    return [row.says(stated) for row in found]
