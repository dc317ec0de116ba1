"""Primus' own words for its kernels and schedules, as features and layouts of a run."""

from __future__ import annotations

from typing import Any

from planner.errors import SpecError
from planner.export.primus.schedules import ALGORITHMS

Values = dict[str, Any]
TURBO = frozenset({
    "enable_primus_turbo", "use_turbo_deepep", "moe_enable_deepep", "turbo_sync_free_moe_stage",
    "use_turbo_grouped_gemm", "use_turbo_grouped_mlp", "moe_use_legacy_grouped_gemm", "cpu_offload",
    "patch_moe_overlap",
})  # fmt: skip
"""Keys that are read for features."""
SCHEDULES = frozenset({
    "patch_primus_pipeline", "pp_algorithm", "pp_max_mem", "patch_zero_bubble", "enable_zero_bubble",
    "zero_bubble_v_schedule", "zero_bubble_v_schedule_mem_setup", "enable_1f1b_v", "zero_bubble_max_pending_backward",
})  # fmt: skip
"""Keys that are read for the schedule of a pipeline."""
_V_SHAPED = {"half": "v-half", "min": "v-min", "zb": "zb-v"}
"""Values of `zero_bubble_v_schedule_mem_setup`."""


def features(values: Values) -> Values:
    """Features of a run with Megatron's backend that Primus' own keys say."""
    turbo = bool(values.get("enable_primus_turbo"))
    stage = values.get("turbo_sync_free_moe_stage") or 0
    if type(stage) is not int or not 0 <= stage <= 3:
        raise SpecError(f"turbo_sync_free_moe_stage: {stage!r:.60} is no stage", "write 0, 1, 2 or 3")
    found: Values = {}
    if values.get("patch_moe_overlap"):
        found["ep_overlap"] = True
    if values.get("num_experts"):
        deepep = (turbo and (values.get("use_turbo_deepep") or stage > 1)) or values.get("moe_enable_deepep")
        if deepep:
            found["dispatcher"] = "deepep"
        found["sync_free_moe"] = stage if turbo else 0
        in_turbo = turbo and (values.get("use_turbo_grouped_gemm") or stage > 1)
        found["grouped_gemm"] = "turbo" if in_turbo else "legacy"
    return found


def torchtitan_features(own: Values) -> Values:
    """Features of a run with torchtitan's backend."""
    if not own.get("primus_turbo.enable_primus_turbo", True):
        return {}
    return {"async_tp": True} if own.get("parallelism.enable_async_tensor_parallel") else {}


def pipeline(values: Values, pp: int) -> Values:
    """The schedule, where one of Primus' own two pipelines runs it; Megatron-LM's say theirs by the layout."""
    if pp == 1:
        return {}
    if values.get("patch_zero_bubble"):
        return _zero_bubble(values)
    if not values.get("patch_primus_pipeline"):
        return {}
    name = str(values.get("pp_algorithm", "1f1b-interleaved"))
    schedule = ALGORITHMS.get(name)
    if schedule is None:
        raise SpecError(f"pp_algorithm: {name[:60]!r} is unknown", f"one of {', '.join(ALGORITHMS)}")
    return _layout(schedule)


def _zero_bubble(values: Values) -> Values:
    """The schedules of the fork of Qi et al. that Primus carries along."""
    if values.get("zero_bubble_v_schedule"):
        setup = str(values.get("zero_bubble_v_schedule_mem_setup", "half"))
        if setup not in _V_SHAPED:
            raise SpecError(
                f"zero_bubble_v_schedule_mem_setup: {setup[:60]!r} is unknown", f"one of {', '.join(_V_SHAPED)}"
            )
        return _layout(_V_SHAPED[setup])
    if values.get("enable_1f1b_v"):
        raise SpecError("enable_1f1b_v: this schedule is not modelled", "write `zero_bubble_v_schedule: true`")
    return _layout("zb-h1") if values.get("enable_zero_bubble", True) else {}


def _layout(schedule: str) -> Values:
    """The schedule with its chunks: two a rank where it is shaped as a V."""
    if schedule == "interleaved-1f1b":
        return {}
    return {"schedule": schedule} | ({"vpp": 2} if schedule in ("zb-v", "v-half", "v-min") else {})
