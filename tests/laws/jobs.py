"""Strategies: models of every architecture, clusters, trainings, trainers with their switches, layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from toys import toy_model

from planner.answer import Plan, PricedLayout
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.evaluate import evaluate, priced_as_given
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model, model_names
from planner.specs.training import AdapterSpec, DocumentLength, Parallelism, TrainingSpec
from planner.trainers.load import RUNTIMES, has_dtype, load_runtime, switches_of
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched

HARDWARE = ("h100", "a100", "b200", "mi300x", "l40s", "gb200", "v100", "rtx-4090", "mi355x")
EXPERTS: dict[str, Any] = {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
DESIGNS: tuple[dict[str, Any], ...] = (
    {},
    {"tie_word_embeddings": True, "vocab_size": 96_000},
    {"gated_mlp": False, "norm": "layernorm", "bias": True, "position_embedding": "alibi"},
    {"sliding_window": 256, "sliding_window_pattern": 4, "qk_norm": True},
    EXPERTS,
    EXPERTS | LATENT,
)
"""Small models: what each changes of a Llama."""
FIELDS: dict[str, tuple[Any, ...]] = {
    "ep_overlap_fraction": (0.0, 0.8, 1.0), "ep_overlap_network_fraction": (0.0, 0.5, 1.0),
    "dispatcher": ("", "alltoall", "deepep", "hybridep"),
    "graphed_modules": ((), ("moe_router",), ("attn", "moe_router", "moe_preprocess")),
    "optimizer_offload_fraction": (0.0, 0.5, 1.0),
    "offload_modules": ((), ("moe_act",), ("core_attn", "attn_proj")), "awaits_token_counts": (False, True),
    "cuda_graphs": (False, True), "cp_comm_type": ("p2p", "all_gather", "a2a"), "host_factor": (1.3, 8.0),
}  # fmt: skip
"""Fields of Megatron's runtime, at values that no switch sets, or sets together with others."""
CHUNKED = ("interleaved-1f1b", "breadth-first", "zb-v", "v-half", "v-min", "dualpipe-v", "zb-v-gathered")
"""Schedules in which a rank holds two chunks at least."""


@dataclass(frozen=True)
class Job:
    """A layout of a job under a trainer, and its price."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    layout: Parallelism
    runtime: RuntimeSpec

    @cached_property
    def answer(self) -> tuple[Candidate, PricedLayout]:
        return priced_as_given(self.model, self.cluster, self.training, self.layout, self.runtime)

    @property
    def candidate(self) -> Candidate:
        return self.answer[0]

    @property
    def priced(self) -> PricedLayout:
        return self.answer[1]

    def plan(self) -> Plan:
        """The whole answer of `plan evaluate`."""
        return evaluate(self.model, self.cluster, self.training, self.layout, runtime=self.runtime)

    def changed(self, **changes: Any) -> Job:
        return replace(self, **changes)

    def trained(self, **changes: Any) -> Job:
        """The same layout for another batch or another sequence."""
        return replace(self, training=TrainingSpec(**(dict(self.training) | changes)))


def models() -> st.SearchStrategy[ModelSpec]:
    """Small models of a few designs, and every model that ships with the planner."""
    small = st.builds(
        lambda layers, design, widths: toy_model(layers, **(design | widths)),
        st.integers(4, 12),
        st.sampled_from(DESIGNS),
        st.sampled_from(
            (
                {},
                {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 16},
                {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 12},
            )
        ),
    )
    return st.one_of(small, st.sampled_from(sorted(model_names())).map(load_model))


@st.composite
def runtimes(draw: st.DrawFn) -> RuntimeSpec:
    """A trainer, some of whose switches are at other values that it has."""
    runtime = load_runtime(draw(st.sampled_from(RUNTIMES)))
    if runtime.name == "megatron" and draw(st.booleans()):
        fields = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True))
        return runtime.model_copy(update={name: draw(st.sampled_from(FIELDS[name])) for name in fields})
    has = switches_of(runtime)
    if not has:
        return runtime
    chosen = draw(st.lists(st.sampled_from(sorted(has)), max_size=4, unique=True))
    return switched(runtime, {name: draw(st.sampled_from(has[name])) for name in chosen})


@st.composite
def layouts(draw: st.DrawFn, model: ModelSpec, runtime: RuntimeSpec) -> Parallelism:
    """A layout with a schedule that the trainer runs."""
    tp, cp = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 1, 2, 4)))
    dp = draw(st.sampled_from((1, 2, 4, 8)))
    schedule = draw(st.sampled_from([name for name in runtime.schedules if name != "auto"]))
    pp = 1 if schedule == "none" else draw(st.sampled_from((2, 4, 8)))
    fewest = 2 if schedule in CHUNKED else 1
    recompute = draw(st.sampled_from(("none", "selective", "full")))
    return Parallelism(
        tp=tp, cp=cp, pp=pp, dp=dp, schedule=schedule,
        vpp=draw(st.sampled_from((2, 3, 4))) if schedule in ("interleaved-1f1b", "breadth-first") else fewest,
        micro_batch_size=draw(st.sampled_from((1, 2, 4))),
        ep=1 if model.moe is None else draw(st.sampled_from((1, 2, 4, 8))),
        recompute=recompute,
        recompute_num_layers=draw(st.sampled_from((None, 1))) if recompute == "full" else None,
        zero_stage=draw(st.sampled_from(runtime.zero_stages)),
        sequence_parallel=draw(st.sampled_from((None, False))),
    )  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn, fine_tuned: bool = True) -> Job:
    """A layout that contradicts neither its model nor its batch, as its trainer takes it."""
    model, runtime = draw(models()), draw(runtimes())
    hardware = load_hardware(draw(st.sampled_from(HARDWARE)))
    layout = draw(layouts(model, runtime))
    per_round = layout.dp * layout.micro_batch_size * layout.pp
    tunes = fine_tuned and draw(st.integers(0, 5)) == 0
    dtypes = [dtype for dtype in ("bf16", "fp8", "mxfp8") if hardware.peak_flops(dtype) and has_dtype(runtime, dtype)]
    assume(dtypes)
    training = TrainingSpec(
        seq_length=draw(st.sampled_from((512, 2048, 4096, 8192, 32_768))),
        global_batch_size=per_round * draw(st.sampled_from((2, 4))),
        dtype=draw(st.sampled_from(dtypes)),  # type: ignore[arg-type]
        moe_imbalance=draw(st.sampled_from((1.0, 1.3))),
        straggler_fraction=draw(st.sampled_from((0.0, 0.1))),
        document_lengths=draw(st.sampled_from((None, (DocumentLength(length=500, share=1.0),)))),
        adapters=AdapterSpec(rank=draw(st.sampled_from((4, 64)))) if tunes else None,
    )
    spare = draw(st.sampled_from((0, 0, 8)))
    num_gpus = layout.tp * layout.cp * layout.dp * layout.pp + spare
    return accepted(Job(model, ClusterSpec(hardware=hardware, num_gpus=num_gpus), training, layout, runtime))


def accepted(job: Job) -> Job:
    """The job, where its layout can be priced; other examples are left out."""
    try:
        assert job.answer
    except SpecError:
        assume(False)
    return job
