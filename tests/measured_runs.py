"""Runs that were never made: observations of a plan on GPUs and links that are slower than its own."""

from typing import Any

from toys import toy_cluster, toy_model, toy_training

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.observe.judge import judged
from planner.observe.observation import GapCause, Observation, Observed, SourceFile, StepSeries
from planner.specs.cluster import ClusterSpec
from planner.specs.training import Parallelism
from planner.trainers.calibration import Calibration, Factor
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

WIDE = {"hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48, "num_key_value_heads": 8}
"""Layers that no host holds up."""


def priced(cluster: ClusterSpec | None = None, runtime: RuntimeSpec | None = None, **sizes: Any) -> Plan:
    """A toy's layout: tensor-parallel in a node, two stages over the network unless `sizes` say otherwise."""
    return evaluate(
        toy_model(**WIDE), cluster or toy_cluster(8), toy_training(global_batch_size=16, seq_length=4096),
        Parallelism(**(sizes or {"tp": 2, "pp": 2, "dp": 2})), runtime=runtime or load_runtime("megatron"),
    )  # fmt: skip


def slower(cluster: ClusterSpec, **factors: float) -> ClusterSpec:
    """The cluster whose kernels take so much longer: kernels_factor for all, or gemm_factor and the like."""
    return Calibration(
        source="", **{name: Factor(value=value, source="") for name, value in factors.items()}
    ).of_cluster(cluster)


def observed(plan: Plan, step_s: float | None, causes: tuple[GapCause, ...] = (), **changes: Any) -> Observed:
    """A run of the plan with a log of a hundred steps, each `step_s` within a percent."""
    seconds = step_s or 1.0
    log: dict[str, Any] = {
        "sources": (SourceFile(path="train.log", format="megatron"),), "step_s": step_s,
        "step_s_spread": (0.99 * seconds, 1.01 * seconds), "num_steps": 100, "num_warmup_steps": 3,
        "drift_fraction": 0.0, "series": StepSeries(steps=(1, 2), seconds=(seconds, seconds)),
    }  # fmt: skip
    return judged(Observation(**{**log, **changes}), plan, "plan.json").model_copy(update={"causes": causes})
