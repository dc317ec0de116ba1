"""Plans that were saved with -o, read back."""

from __future__ import annotations

from itertools import pairwise

from planner.answer import SCHEMA_VERSION, Plan, PricedLayout, StagePlan
from planner.errors import SpecError
from planner.specs.checking import checked
from planner.specs.model import ModelSpec
from planner.specs.reading import label, load_yaml


def read_plan(path: str) -> Plan:
    """The plan in a file, `-` for stdin; SpecError where the file holds no plan of this version."""
    data, where = load_yaml(path), label(path)
    if not {"schema_version", "best"} <= data.keys():
        raise SpecError(f"{where}: is not a plan", "save one with plan --model 405b --gpus 2048 -o plan.json")
    if data["schema_version"] != SCHEMA_VERSION:
        raise SpecError(
            f"{where}: schema_version {data['schema_version']!r}, this version reads {SCHEMA_VERSION}", "plan again"
        )
    plan = checked(Plan, {key: value for key, value in data.items() if key != "inputs_sha256"}, where)
    problem = _contradiction(plan.best, plan)
    if problem:
        raise SpecError(f"{where}: best: {problem}", "plan again: a saved plan is not for editing")
    return plan


def _contradiction(layout: PricedLayout, plan: Plan) -> str | None:
    """What in a layout that somebody may have edited does not go together."""
    sizes, stages, layers = layout.parallelism, layout.stages, plan.model.spec.num_hidden_layers
    numbers = (sizes.tp, sizes.cp, sizes.pp, sizes.vpp, sizes.dp, sizes.ep, sizes.micro_batch_size)
    if min(*numbers, sizes.num_microbatches) < 1:
        return "parallelism has a size below 1"
    ranks = sizes.tp * sizes.cp * sizes.pp * sizes.dp
    if not ranks == sizes.num_gpus_used <= plan.cluster.num_gpus:
        return f"{ranks} ranks, num_gpus_used {sizes.num_gpus_used}, num_gpus {plan.cluster.num_gpus}"
    batch = sizes.dp * sizes.micro_batch_size * sizes.num_microbatches
    if batch != plan.training.global_batch_size:
        return f"dp · micro-batch · micro-batches = {batch}, global_batch_size {plan.training.global_batch_size}"
    if len(stages) != sizes.pp or any(len(stage.chunks) != sizes.vpp for stage in stages):
        return f"stages are not pp {sizes.pp} of vpp {sizes.vpp} chunks"
    chunks = sorted(chunk for stage in stages for chunk in stage.chunks)
    held = [last - first for first, last in chunks]
    if min(held) < 0 or sum(held) != layers or any(a[1] != b[0] for a, b in pairwise(chunks)):
        return f"its chunks do not hold layers 0 to {layers} one after the other"
    if not all(_holds_what_it_recomputes(stage, plan.model.spec) for stage in stages if stage.num_recomputed):
        return "its stages recompute layers that they do not hold"
    return None


def _holds_what_it_recomputes(stage: StagePlan, model: ModelSpec) -> bool:
    held = [[model.layers[first:last].count(kind) for kind in model.kinds] for first, last in stage.chunks]
    counts = stage.num_recomputed
    if [len(row) for row in counts] != [len(row) for row in held]:
        return False
    return all(
        0 <= n <= most for row, having in zip(counts, held, strict=True) for n, most in zip(row, having, strict=True)
    )


def with_alternative(plan: Plan, number: int | None) -> Plan:
    """The plan with its `number`-th alternative, counted from 1, as its best layout; None for the plan as it is."""
    if number is None:
        return plan
    if not 1 <= number <= len(plan.alternatives):
        raise SpecError(
            f"--alternative {number}: the plan has {len(plan.alternatives)}", "plan … --top N keeps more of them"
        )
    chosen = plan.alternatives[number - 1]
    best = chosen.model_copy(update={"runtime_spec": None})
    return plan.model_copy(update={"best": best, "runtime_spec": chosen.runtime_spec or plan.runtime_spec})
