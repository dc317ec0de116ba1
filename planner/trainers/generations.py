"""Generations of a trainer: runs name no version, and what a run uses dates it."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

from planner.specs.base import Fields, Said, Texts
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.training import Parallelism
from planner.trainers.load import RUNTIMES, Likely, load_runtime, switches_of
from planner.trainers.shipped import architectures_of
from planner.trainers.spec import RuntimeSpec

_log = logging.getLogger(__name__)
_ONE_RECIPE = (None, "bf16", "fp16", "fp8")
_WITHOUT_EXPERTS = {"ep_overlap": False, "fused_experts": False}
"""Features that a model without experts lacks, although graphs of whole iterations stand for them too."""

NATURAL_IMBALANCE = 1.6
"""Tokens of the fullest expert rank over the mean where a run routes its data as it comes (`natural_routing`) and an
auxiliary loss alone balances the experts. Qwen3 235B on 256 H100, forced and natural at four lengths of sequence
(Megatron-MoE-ModelZoo), asks for 1.60 to 1.65. Models that steer the load by biases take what forced routing takes:
DeepSeek-V3 on 256 to 8,192 GB300 (MLPerf v6.0) within 8%, Moonlight and Nemotron 3.5 within 7%."""
STRONG_LOSS, STRONG_IMBALANCE = 0.01, 1.2
"""The same where the auxiliary loss weighs this or more: Mixtral 8x7B on 128 H100 and on 128 A100 asks for 1.06 and
1.22 (Megatron-LM's release tests). Another layout of it and 8x22B, which were not read, ask for 1.12 and 1.33. The loss
of Qwen3 weighs 0.001."""

TAIL = 1.25
"""The excess of the fullest step of the fullest layer over that of all in the mean. A guess, fitted to nothing."""


def runtime_of_its_day(
    name: str, architecture: str, model: ModelSpec, layout: Parallelism, features: Said
) -> RuntimeSpec:
    """The oldest generation of the trainer `name` that knows all that a run uses; the name itself means today's.

    What a run uses dates it: its silicon, the design of its model, its layout, and the features switched on. An A100
    with a GPT of 2021 ran without FlashAttention, unless the run says so (`features: {"flash_attention": true}`); so
    did torchtitan on an H100 without a compiled loss (`{"cross_entropy_fusion": true}`) and without FlexAttention.
    """
    used = {**features, "scaling": features.get("precision_recipe") not in _ONE_RECIPE}
    for runtime in _older(name):
        knows_run = runtime.models == "any" or (_is_gpt(model) and _knows_layout(runtime, layout))
        if architecture in runtime.architectures and knows_run and not any(map(used.get, runtime.later_features)):
            return runtime
    return load_runtime(todays(name, architecture))


def usual_trainer(model: ModelSpec, hardware: HardwareSpec, tunes: bool) -> str:
    """The trainer of a job that names none: Megatron-LM from the beginning, transformers to tune, for a module our own
    runner, since no other builds one.
    """
    if model.traced is not None:
        return "torch-eager"
    return "hf" if tunes else todays("megatron", hardware.architecture)


def as_built(model: ModelSpec, runtime: RuntimeSpec) -> ModelSpec:
    """The model as a trainer builds it."""
    if not (runtime.runs_transformers and model.num_nextn_predict_layers):
        return model
    _log.info("%s is trained without multi-token prediction, which transformers' models have none of", model.name)
    return model.without_predictions()


def todays(name: str, architecture: str) -> str:
    """The trainer of today of a name without a version on such silicon: Megatron-LM's is Primus' on AMD's."""
    other = "" if "@" in name else load_runtime(name).stand_in
    return other if other and architecture in architectures_of(other) else name


def objection_to_silicon(runtime: RuntimeSpec, hardware: HardwareSpec) -> str | None:
    """The reason why a trainer of today does not run on a GPU; None where it does."""
    if runtime.year is not None or hardware.architecture in (runtime.architectures or (hardware.architecture,)):
        return None
    return f"{runtime.name} runs on {', '.join(runtime.architectures)}, and {hardware.name} is {hardware.architecture}"


def described(
    runtime: RuntimeSpec, hardware: HardwareSpec, model: ModelSpec, features: Said
) -> tuple[RuntimeSpec, Texts]:
    """The trainer of a run that exists, with the run's features, and the names, or values, that are unknown.

    All that describes runs comes here (flags of `plan evaluate`, lines of --runs, imports), so that features left
    unsaid have one likely value. Raises Unsupported where the run did what is not modelled.
    """
    return runtime.with_features({**unsaid_features(runtime, hardware, model, features), **features})


def unsaid_features(runtime: RuntimeSpec, hardware: HardwareSpec, model: ModelSpec, said: Said) -> Fields:
    """The features that a run on such hardware, with those that it says, has switched on unless it says otherwise."""
    features: Fields = {"cross_entropy_fusion": True} if runtime.runs_fuse_loss else {}
    features |= {"liger": False} if runtime.runs_keep_logits else {}
    features |= {"optimizer_post_validation": True} if runtime.runs_validate_later else {}
    if model.moe is None:
        return features | _WITHOUT_EXPERTS
    if "sync_free_moe" in switches_of(runtime) and said.get("dispatcher") == "deepep":
        # all configurations of Primus that have DeepEP fuse routing and permutation, too
        features |= {"sync_free_moe": 1}
    is_rack = hardware.nvlink_domain_size > hardware.gpus_per_node
    graphs = {"cuda_graph": "transformer_engine"} if is_rack and runtime.graphs_routing_on_racks else {}
    return features | graphs


class Imbalance(NamedTuple):
    """Tokens of the fullest expert rank over the mean."""

    mean: float = 1.0
    """In the mean of all layers and steps, which the step follows."""
    peak: float = 1.0
    """In the layers and steps that decide a rank's memory."""

    spread: float = 0.0
    """Standard deviation of the tokens of an expert over their mean, where that decides."""

    @property
    def fields(self) -> dict[str, float]:
        """The fields of a training."""
        return {"moe_imbalance": self.mean, "moe_peak_imbalance": self.peak, "moe_spread": self.spread}


FORCED = Imbalance()
BIASED = Imbalance(peak=1.4)
"""Biases even out the mean of layers and steps, not the fullest: Nemotron 3.5 Lightning on eight GB200 takes 16 GiB
more within 20 steps (Megatron-LM's golden values), which asks for 1.6, its cards for 1.5 and 1.7, a cut of it for 1.4
and a mixture of Megatron-LM's tests for 1.2."""
TUNED = Imbalance(spread=2.0)
"""Fine-tuning, whose texts are alike: 8 experts of DeepSeek-V2-Lite a rank (Primus on MI355X, 1.8 times as long as
balanced) ask for 2.2, 32 of Qwen3-30B (ms-swift on H20) for 3 and 8 for none, 4 of gpt-oss for 3 (Megatron-Bridge's
cards)."""
UNBALANCED = Imbalance(spread=4.0)
"""Training whose auxiliary loss weighs nothing, and that no biases balance either: 64 H100 with gpt-oss-120b (a card of
Megatron-Bridge, which trains it so) ask for 4.8; gpt-oss-20b on 16, which was not read, for 2.9."""
TUNED_BY_BIAS = Imbalance(spread=0.01)
"""The same where biases balance and go on moving: even in the mean, as far as anyone knows before the job runs."""


def imbalance_of(model: ModelSpec, features: Said, runtime: RuntimeSpec, tunes: bool = False) -> Imbalance:
    """How uneven the ranks of experts are in a run with these features.

    Published pre-training forces a balance unless it says otherwise; fine-tuning and some trainers do not.
    """
    natural, tunes = features.get("natural_routing"), tunes or bool(features.get("packed_documents"))
    if model.moe is None or natural is False:
        return FORCED
    if model.balances_by_bias and (natural or tunes):
        return TUNED_BY_BIAS if tunes else BIASED
    if tunes and runtime.adapts_experts:
        return TUNED
    if natural and model.moe.router_aux_loss_coef == 0:
        return UNBALANCED
    is_strong = (model.moe.router_aux_loss_coef or 0.0) >= STRONG_LOSS
    mean = (STRONG_IMBALANCE if is_strong else NATURAL_IMBALANCE) if natural else runtime.natural_imbalance
    return Imbalance(mean, 1 + TAIL * (mean - 1))


def with_likely(runtime: RuntimeSpec, model: ModelSpec, entry: Likely) -> RuntimeSpec:
    """The runtime of a run that has an entry's values."""
    without = _WITHOUT_EXPERTS if model.moe is None else {}
    return runtime.with_features({**without, **entry.switches})[0]


@cache
def _older(name: str) -> tuple[RuntimeSpec, ...]:
    """Generations of a trainer before today's, oldest first."""
    generations = [load_runtime(other) for other in RUNTIMES if other != name]
    return tuple(
        sorted((r for r in generations if r.year is not None and r.family == name), key=lambda r: (r.year, r.name))
    )


def _is_gpt(model: ModelSpec) -> bool:
    """True for a GPT as of 2021: LayerNorm, a plain MLP, as many key as query heads, positions learned or none."""
    plain = model.norm == "layernorm" and not model.gated_mlp and model.position_embedding != "rope"
    return plain and model.moe is None and model.mla is None and model.num_key_value_heads == model.num_attention_heads


def _knows_layout(runtime: RuntimeSpec, layout: Parallelism) -> bool:
    """True where the generation, of 2021 or 2022, can run the layout."""
    if (
        (layout.cp > 1 and not runtime.has_context_parallel)
        or layout.ep > 1
        or ((layout.zero_stage or 0) > 1 and layout.fsdp is None)
    ):
        return False
    if not set(layout.recompute_modules) <= {"core_attn"}:
        return False
    return runtime.has_sequence_parallel or not (layout.sequence_parallel or layout.recompute == "selective")
