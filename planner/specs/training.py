"""The training step: what is computed per optimizer step, what is trained, and how one layout is written down.

Adapters are trained where the weights of a model stay as they are (LoRA, QLoRA). An objective is the loss of a step, as
how many sequences an example has and which forwards run without a gradient. How a long run is operated stands beside
it: storage, failures, spare nodes, price; what is not given has a default with a source.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from planner.record import record
from planner.specs.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec

Bits = Literal[4, 8, 16]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
MIXERS = ("in_proj", "out_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
GROUPS = {
    "all-linear": (*ATTENTION, *LATENT, *MIXERS, *MLP),
    "attention": (*ATTENTION, *LATENT),
    "mlp": MLP,
}
"""Names that stand for several modules. Routed experts are in none of them, but for trainers whose `all-linear` and
`mlp` mean them too (`RuntimeSpec.adapts_experts`)."""
TARGETS = (*GROUPS["all-linear"], *EXPERTS, "lm_head")


class AdapterSpec(Spec):
    """Low-rank adapters (Hu et al. 2021): y = x·W + (x·A)·B·scale, where W is frozen and A and B are trained."""

    rank: PositiveInt = Field(default=16, le=2**14)
    """Columns of A and rows of B."""
    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Products that get an adapter, by peft's names (q_proj, …, down_proj), or all-linear, attention, mlp."""
    base_bits: Bits = 16
    """Bits of a frozen weight of a linear layer (QLoRA: 4). Embedding, head, norms and routers stay in 16."""
    dropout: Fraction = 0.0
    """Share of an adapter's inputs that is dropped."""

    @field_validator("targets", mode="after")
    @classmethod
    def _known(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for name in targets:
            if name not in (*GROUPS, *TARGETS):
                raise ValueError(f"no module is called {name!r}: {', '.join((*GROUPS, *TARGETS))}")
        return targets

    @property
    def adapts_mlps(self) -> bool:
        """True where a group of modules with those of an MLP is a target."""
        return not {"all-linear", "mlp"}.isdisjoint(self.targets)

    @property
    def modules(self) -> frozenset[str]:
        """The names of all targets, groups resolved."""
        return frozenset(name for target in self.targets for name in GROUPS.get(target, (target,)))


ObjectiveName = Literal["lm", "dpo", "kto", "orpo"]
Reference = Literal["model", "adapters", "precomputed"]


@record
class Objective:
    """One objective."""

    says: str
    num_sequences: int = 1
    """Sequences of an example: an answer that is preferred and one that is not are two."""
    policy_forwards: int = 0
    """Forwards of the trained model without a gradient, beside the one with it, for each sequence."""
    reference_forwards: int = 0
    """Forwards of the reference model for each sequence."""
    source: str = ""


OBJECTIVES: dict[str, Objective] = {
    "lm": Objective("the next token of each sequence", source="transformers.Trainer, trl.SFTTrainer"),
    "dpo": Objective(
        "an answer that is preferred over another, each beside a reference model's",
        num_sequences=2, reference_forwards=1,
        source="Rafailov et al. 2023; trl.DPOTrainer, which concatenates both answers of a pair",
    ),
    "kto": Objective(
        "an answer that is wanted or not, beside a reference model's, and one of another prompt beside both",
        policy_forwards=1, reference_forwards=2,
        source="Ethayarajh et al. 2024; trl.KTOTrainer (calculate_kl)",
    ),
    "orpo": Objective(
        "an answer that is preferred over another by the odds of both, without a reference model",
        num_sequences=2, source="Hong et al. 2024; trl.ORPOTrainer",
    ),
}  # fmt: skip
"""All objectives, by name."""


class ObjectiveSpec(Spec):
    """The objective of a training."""

    name: ObjectiveName = "lm"
    """The loss: of the next token (lm), of pairs of answers (dpo, orpo), of single ones (kto)."""
    reference: Reference = Field(default="model")
    """The reference model of dpo and kto: a second copy of the weights, the weights without their adapters, or
    log-probabilities that were computed before the training."""
    scored_tokens: NonNegativeInt = Field(default=0, le=2**40)
    """Tokens of a GPU's largest micro-batch whose log-probabilities are computed beside the training, without a
    gradient (reinforcement learning); 0: there is none."""
    scored_alone: bool = False
    """The optimizer's states are on the host while log-probabilities are computed, and answers generated."""
    rollout_fraction: Fraction = 0.0
    """Share of a GPU's memory that generation takes between updates, beside what is trained."""
    rollout_stays: bool = False
    """Generation keeps its share during updates too: its engine does not sleep."""
    critics: NonNegativeInt = Field(default=0, le=8)
    """Models of the same size that are trained on the same GPUs: their weights and states stay there."""
    frozen_copies: NonNegativeInt = Field(default=0, le=8)
    """Models of the same size on the same GPUs that are not trained: a reference, one of rewards."""

    @property
    def row(self) -> Objective:
        """The facts of the objective."""
        return OBJECTIVES[self.name]

    @property
    def has_pairs(self) -> bool:
        """True where an example is two sequences, which a micro-batch holds together."""
        return self.row.num_sequences == 2

    @property
    def plain_forwards(self) -> int:
        """Forwards without a gradient for each sequence of a step."""
        return self.row.policy_forwards + (self.reference != "precomputed") * self.row.reference_forwards

    @property
    def copies_weights(self) -> bool:
        """True where a second copy of the weights stands beside those that are trained."""
        return self.row.reference_forwards > 0 and self.reference == "model"


Rate = Annotated[PositiveFloat, Field(le=1e9)]


class OperationsSpec(Spec):
    """The place where a run takes months; null where `planner/months/data/facts.yaml` has the default."""

    storage_gb_per_s: Rate | None = None
    """Rate at which all ranks together write a checkpoint, or read it, 10^9 bytes a second."""
    failures_per_1000_gpu_days: Annotated[NonNegativeFloat, Field(le=1e6)] | None = None
    """Unplanned interruptions of the job, per 1,000 days of one GPU."""
    num_spare_nodes: NonNegativeInt | None = None
    """Nodes that wait beside the job's own to replace those that fail; null: a pool that others share has one."""
    usd_per_gpu_hour: Annotated[NonNegativeFloat, Field(le=1e6)] | None = None
    """Price of one GPU for an hour; null: that of the hardware profile."""


Dtype = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
"""The dtype of products; everything else stays in 16 bits."""

RankOrder = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
"""The order in which ranks are numbered, the innermost group first."""
Recompute = Literal["none", "selective", "full"]
ScheduleName = str

_FULLY_SHARDED = re.compile(r"\s*(all|yes|true|on)\s*|.*([fh]sdp|zero\D?3|shard|group).*", re.IGNORECASE)


class DocumentLength(Spec):
    """One length of documents, and how many have it."""

    length: PositiveInt = Field(le=2**31)
    """Tokens of a document."""
    share: PositiveFloat = Field(le=1e18)
    """Share of the documents that are so long; shares may add up to any number."""


FULLEST_STEPS = 0.95
"""Share of the layers and steps of a histogram of imbalances in which a rank must fit."""


class TrainingSpec(Spec):
    """One optimizer step, and how many tokens in all."""

    seq_length: PositiveInt = Field(le=2**27)
    """Tokens of a sequence."""
    global_batch_size: PositiveInt = Field(le=2**31)
    """Sequences per optimizer step."""
    dtype: Dtype = "bf16"
    """Dtype of products; everything else stays in 16 bits."""
    tokens: PositiveFloat | None = Field(default=None, le=1e18)
    """Tokens of the whole training run, for days and cost."""
    moe_imbalance: PositiveFloat = Field(default=1.0, ge=1.0, le=100.0)
    """Tokens on the most loaded expert rank over the mean, as the mean of all layers and steps: 1 is forced balance."""
    moe_peak_imbalance: PositiveFloat | None = Field(default=None, ge=1.0, le=100.0)
    """The same in the layers and steps that decide a rank's memory; given none, no more than in the mean."""
    moe_spread: NonNegativeFloat = Field(default=0.0, le=100.0)
    """Standard deviation of the tokens that experts get, over their mean: the fullest rank gets more the more ranks
    there are and the fewer experts each has. 0: `moe_imbalance` says it."""
    straggler_fraction: NonNegativeFloat = Field(default=0.0, le=10.0)
    """Share by which the slowest rank computes slower than the profile says."""
    document_lengths: tuple[DocumentLength, ...] | None = Field(default=None, min_length=1, max_length=1000)
    """Lengths of the documents that are packed into a sequence, to which attention is confined where the trainer masks
    them; null: a sequence is one document."""
    batching: Literal["packed", "padded"] = "packed"
    """Examples are packed into whole sequences, or a micro-batch is padded to the longest of its examples, whose
    lengths `document_lengths` has."""
    examples: PositiveInt | None = Field(default=None, le=2**50)
    """Examples of an epoch; a pair of answers is one."""
    epochs: PositiveFloat = Field(default=1.0, le=1e6)
    """Times that each example is seen."""
    adapters: AdapterSpec | None = None
    """Adapters that are trained in the place of the weights (LoRA, QLoRA); null: all weights are trained."""
    starts_trained: bool = False
    """The weights begin as somebody trained them (`--finetune`): exports ask for them, and a step takes as long."""
    objective: ObjectiveSpec = ObjectiveSpec()
    """The loss that is trained on: of the next token, or of pairs of answers beside a reference model."""
    operations: OperationsSpec = OperationsSpec()
    """How a long run is operated: storage, failures, spare nodes, price."""

    @model_validator(mode="before")
    @classmethod
    def _histogram(cls, data: Any) -> Any:
        """A histogram of imbalances, `1.2:0.8,2.5:0.2` with the share of each, as its mean and its tail."""
        if not isinstance(data, dict) or not isinstance(data.get("moe_imbalance"), str):
            return data
        try:
            bars = sorted(
                (float(x), float(share)) for x, share in (b.split(":") for b in data["moe_imbalance"].split(","))
            )
            whole = sum(share for _, share in bars)
            mean = sum(x * share for x, share in bars) / whole
        except (ValueError, ZeroDivisionError):
            raise ValueError("moe_imbalance: is no number and no histogram such as 1.2:0.8,2.5:0.2") from None
        passed, peak = 0.0, bars[-1][0]
        for x, share in bars:
            passed += share
            if passed >= FULLEST_STEPS * whole:
                peak = x
                break
        return {**data, "moe_imbalance": mean, "moe_peak_imbalance": peak}

    @model_validator(mode="after")
    def _whole_pairs(self) -> Self:
        objective = self.objective
        if objective.has_pairs and self.global_batch_size % 2:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is odd, and {objective.name} takes pairs of sequences"
            )
        if objective.reference == "adapters" and objective.row.reference_forwards and self.adapters is None:
            raise ValueError("objective: reference adapters needs adapters: without them the reference is a model")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.seq_length * self.global_batch_size


class Parallelism(Spec):
    """One layout, as a user or a published run states it.

    `dp` counts data-parallel ranks, so tp·cp·pp·dp is the number of GPUs used (given none, all of them); ep is carved
    out of dp·cp·tp/etp.
    """

    tp: PositiveInt = 1
    """Size of tensor parallelism."""
    cp: PositiveInt = 1
    """Size of context parallelism."""
    pp: PositiveInt = 1
    """Number of pipeline stages."""
    vpp: PositiveInt = 1
    """Number of model chunks that a rank holds."""
    dp: PositiveInt = 1
    """Number of data-parallel ranks."""
    ep: PositiveInt = 1
    """Size of expert parallelism."""
    etp: PositiveInt | None = None
    """Tensor parallelism inside an expert; given none, tp for dense models and 1 for MoE."""
    micro_batch_size: PositiveInt = 1
    """Sequences of a micro-batch."""
    schedule: ScheduleName | None = None
    """Name of the pipeline schedule; given none, 1f1b, interleaved-1f1b where vpp > 1, and none where pp = 1."""
    sequence_parallel: bool | None = None
    """True for sequence parallelism; given none, on where tp > 1."""
    recompute: Recompute = "none"
    """Activations that are recomputed: none, those of some modules, or those of whole layers."""
    recompute_modules: tuple[str, ...] = ()
    """Megatron's module names; given none, `selective` means core attention, and some under `none` mean `selective`."""
    recompute_num_layers: PositiveInt | None = None
    """Layers of each stage (its first ones) that full recompute covers; given none, all."""
    recompute_layers: tuple[NonNegativeInt, ...] | None = None
    """The decoder layers that full recompute covers, by number from 0 on; given none, `recompute_num_layers` says."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO's stage, the last of what data-parallel ranks shard: 0 nothing, 1 optimizer, 2 gradients, 3 weights; given
    none, 1, or the trainer's own where it has no 1."""
    fsdp: int | str | None = None
    """Fully sharded data parallel (zero_stage 3 where none is given); a number in it is the size of the group that
    shards whatever zero_stage says (HSDP)."""
    rank_order: RankOrder = "tp-cp-ep-dp-pp"
    """Order of the ranks: stages lie outside data parallelism, or inside (Megatron's --use-tp-pp-dp-mapping)."""
    layers_per_stage: tuple[int, ...] | None = None
    """Decoder layers of each stage (length pp), or of each chunk (length pp·vpp, in model order)."""
    layout: str | None = None
    """Megatron's --pipeline-model-parallel-layout string."""

    @field_validator("fsdp", mode="before")
    @classmethod
    def _sharded(cls, value: object) -> object:
        """Read JSON's true as all ranks, and values that say no as none."""
        if value is False or (isinstance(value, str) and value.strip().lower() in ("", "no", "none", "false", "off")):
            return None
        if value is True:
            return "all"
        number = re.fullmatch(r"\s*(-?\d+)\s*", str(value))
        if number is not None and int(number[1]) < 1:
            raise ValueError(f"fsdp shards over {number[1]} ranks: give at least 1, or null")
        if isinstance(value, str) and number is None and not _FULLY_SHARDED.fullmatch(value):
            raise PydanticCustomError("shard_group", "no group of ranks")
        return value

    @field_validator("recompute_modules", mode="after")
    @classmethod
    def _core_attention(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Papers write "attention" or "core attention" for what Megatron calls core_attn."""
        return tuple("core_attn" if re.match(r"(core.?)?att", name, re.IGNORECASE) else name for name in names)

    @model_validator(mode="after")
    def _one_split(self) -> Self:
        counts, chunks = self.layers_per_stage, self.pp * self.vpp
        if counts is None:
            return self
        if self.layout is not None:
            raise ValueError("give layers_per_stage or layout, not both")
        if len(counts) not in (self.pp, chunks):
            raise ValueError(
                f"layers_per_stage has {len(counts)} entries, expected pp ({self.pp}) or pp·vpp ({chunks})"
            )
        if min(counts) < 0:
            raise ValueError(f"layers_per_stage has a negative count ({min(counts)})")
        return self

    @model_validator(mode="after")
    def _one_recompute(self) -> Self:
        for name in ("recompute_num_layers", "recompute_layers"):
            if (value := getattr(self, name)) is not None and self.recompute != "full":
                shown = value if isinstance(value, int) else ",".join(map(str, value))
                raise ValueError(f"{name} {shown} goes with recompute full, not {self.recompute}")
        if self.recompute_num_layers is not None and self.recompute_layers is not None:
            raise ValueError("recompute_num_layers and recompute_layers: both given, one of them says what is covered")
        if self.recompute_modules and self.recompute == "full":
            raise ValueError(
                f"recompute_modules {','.join(self.recompute_modules)} go with recompute selective, not full"
            )
        return self

    @property
    def fsdp_shard_size(self) -> int | None:
        """Ranks that the weights are sharded over, where `fsdp` names a number."""
        digits = re.findall(r"(?:shard|group)\D*(\d+)|^(\d+)$", str(self.fsdp or ""))
        return next((int(a or b) for a, b in digits), None)


PINS = (
    "tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "zero_stage", "shard_size", "recompute",
    "schedule", "rank_order",
)  # fmt: skip
"""Fields of `SearchLimits` that pin an axis."""


class SearchLimits(Spec):
    """The search's choices: each axis pinned to a list of values, or free (null)."""

    tp: tuple[PositiveInt, ...] | None = None
    """Sizes of tensor parallelism."""
    cp: tuple[PositiveInt, ...] | None = None
    """Sizes of context parallelism."""
    ep: tuple[PositiveInt, ...] | None = None
    """Sizes of expert parallelism."""
    etp: tuple[PositiveInt, ...] | None = None
    """Sizes of tensor parallelism inside an expert."""
    pp: tuple[PositiveInt, ...] | None = None
    """Numbers of pipeline stages."""
    vpp: tuple[PositiveInt, ...] | None = None
    """Numbers of model chunks that a rank holds."""
    dp: tuple[PositiveInt, ...] | None = None
    """Numbers of data-parallel ranks."""
    micro_batch_size: tuple[PositiveInt, ...] | None = None
    """Sequences of a micro-batch."""
    recompute: tuple[Recompute, ...] | None = None
    """Modes of recomputing."""
    zero_stage: tuple[Literal[0, 1, 2, 3], ...] | None = None
    """ZeRO stages, as in Parallelism."""
    shard_size: tuple[PositiveInt, ...] | None = None
    """Ranks that share what ZeRO shards: dp·cp, or a divisor of it (HSDP)."""
    schedule: tuple[ScheduleName, ...] | None = None
    """Schedules of the pipeline."""
    rank_order: tuple[RankOrder, ...] | None = None
    """Orders of the ranks, as in Parallelism."""
    switches: dict[str, bool | int | float | str] | Literal["default"] | None = None
    """Switches of the recipe that are pinned, by name; `default` keeps the trainer's own value of every switch."""
    allow: tuple[str, ...] = ()
    """Switches that change numerics (or what is checked) and may be chosen; a dtype such as `fp8` is one too."""
    tp_across_nodes: bool = False
    """Let a tensor-parallel group leave its NVLink domain."""
    top: PositiveInt = Field(default=5, le=1000)
    """Alternatives to report beside the best plan."""
    time_limit_s: PositiveFloat = 30.0
    """Seconds after which the search answers with the best that it has."""
    gap_fraction: NonNegativeFloat = Field(default=0.005, le=1.0)
    """A shape is cut when its bound is within this fraction of the incumbent."""
    fastest: bool = False
    """The fastest layout comes first, even where one within a percent of it is simpler or loses less."""
    oom_risk: PositiveFloat = Field(default=0.1, lt=1.0)
    """Largest probability of running out of memory that a layout may have."""
    memory_headroom_gib: NonNegativeFloat | None = Field(default=None, le=1e6)
    """GPU memory to leave free on every rank, in place of the rule of `oom_risk`; null: the rule holds."""


def tokens_split(cp: Any, shards: Any) -> Any:
    """Number of parts that a sequence is cut into: two equal chunks for each rank of cp, `shards` for tp.

    lcm(2, shards) · cp where cp > 1, else shards.
    """
    even = shards * (1 + shards % 2)
    return shards + (cp > 1) * (cp * even - shards)
