"""Random plans of everything that the probe runs: models, grids, schedules, recomputation, trainers, dtypes, GPUs."""

from __future__ import annotations

from math import prod
from random import Random
from typing import Any

from planner.answer import Plan
from planner.errors import PlannerError
from planner.layout.evaluate import evaluate
from planner.probe.plan_runs import require_layers, require_split
from planner.probe.plan_slice import ProbeOptions
from planner.probe.run_price import in_eager_torch
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec

MODELS = (
    *("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-2-13b", "qwen3-8b", "qwen3-32b"),
    *("qwen2.5-72b", "gpt3-175b", "bloom-176b", "opt-175b", "nemotron-4-340b", "megatron-22b", "seed-oss-36b"),
    *("olmo-3-32b", "gemma-3-27b", "llama-4-scout", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b"),
    *("qwen3-235b-a22b", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "moonlight-16b", "kimi-k2"),
    *("glm-4.5-air", "gpt-oss-20b", "gpt-oss-120b", "minimax-m2"),
)
HARDWARE = ("h100", "h200", "h800", "h20", "mi300x")
TRAINERS = ("torch-eager", "megatron", "torchtitan", "deepspeed")
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "breadth-first", "dualpipe-v")
MOST_GPUS = 16


def random_plan(random: Random, layers_per_chunk: int = 3, most_stages: int = 4) -> Plan:
    """A plan that fits in eager torch and that `plan probe` takes."""
    while True:
        plan = _attempt(random, layers_per_chunk, most_stages)
        if plan is not None:
            return plan


def _attempt(random: Random, layers_per_chunk: int, most_stages: int) -> Plan | None:
    try:
        plan = _plan(random, layers_per_chunk, most_stages)
        require_layers(plan)
        require_split(plan, ProbeOptions(device="cuda"))
        eager = in_eager_torch(plan)
    except PlannerError:
        return None
    layout = plan.parallelism
    if layout.cp > 1 and plan.cluster.hardware.is_amd:
        return None  # AOTriton's mask is aligned to the first key
    is_refused = any("refuses this layout" in warning for warning in plan.best.warnings)
    if is_refused or not eager.best.fits or (layout.etp > 1 and plan.model.spec.moe is not None):
        return None
    return plan


def _plan(random: Random, layers_per_chunk: int, most_stages: int) -> Plan:
    pick: Any = random.choice
    sizes = {
        "tp": pick((1, 1, 2, 4, 8)), "cp": pick((1, 1, 1, 2, 4)), "pp": min(pick((1, 2, 2, 4)), most_stages),
        "dp": pick((1, 2, 4)),
    }  # fmt: skip
    schedule = pick(SCHEDULES) if sizes["pp"] > 1 else "none"
    vpp = {"interleaved-1f1b": 2, "breadth-first": 2, "zb-v": 2, "dualpipe-v": 2}.get(schedule, 1)
    micro_batch_size, num_microbatches = pick((1, 1, 2, 4)), sizes["pp"] * pick((1, 2, 4)) * 2
    model = _cut(load_model(pick(MODELS)), sizes["pp"] * vpp * random.randint(1, layers_per_chunk))
    hardware = load_hardware(pick(HARDWARE))
    ranks = sizes["tp"] * sizes["cp"] * sizes["dp"]
    ep = pick([n for n in (1, 2, 4, 8) if ranks % n == 0]) if model.moe is not None else 1
    layout = Parallelism(
        **sizes, vpp=vpp, ep=ep, micro_batch_size=micro_batch_size, schedule=schedule,
        recompute=pick(("none", "none", "selective", "full")),
        sequence_parallel=sizes["tp"] > 1 and (model.moe is not None or random.random() < 0.8),
        zero_stage=pick((0, 1, 1)),
    )  # fmt: skip
    training = TrainingSpec(
        seq_length=pick((2048, 4096, 8192, 32768, 131072)),
        global_batch_size=micro_batch_size * num_microbatches * sizes["dp"],
        dtype=pick(("bf16", "bf16", "fp8")),
    )
    cluster = ClusterSpec(hardware=hardware, num_gpus=prod(sizes.values()))
    return evaluate(model, cluster, training, layout, runtime=pick(TRAINERS))


def _cut(model: ModelSpec, num_layers: int) -> ModelSpec:
    """The model with fewer layers of each kind in the same pattern, the last of them if it begins with others."""
    return ModelSpec(**{**model.model_dump(exclude_unset=True), "num_hidden_layers": num_layers})


def described(plan: Plan) -> str:
    layout, training = plan.parallelism, plan.training
    return (
        f"{plan.model.name} L{plan.model.spec.num_hidden_layers} {plan.cluster.hardware.name} {plan.runtime} "
        f"{training.dtype} tp{layout.tp}{'s' if layout.sequence_parallel else ''} cp{layout.cp} pp{layout.pp} "
        f"vpp{layout.vpp} dp{layout.dp} ep{layout.ep} {layout.schedule} mb{layout.micro_batch_size}x"
        f"{layout.num_microbatches} s{training.seq_length} {layout.recompute} zero{layout.zero_stage}"
    )
