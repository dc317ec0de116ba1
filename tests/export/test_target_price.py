"""A plan is priced under the trainer that it is exported to, and refused where it no longer fits there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.answer import Plan
from planner.errors import Infeasible
from planner.export.export import bundle_of, export
from planner.export.refusal import priced_for
from planner.layout.evaluate import evaluate
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime

Planned = Callable[..., Plan]
OWN = [("megatron", "megatron"), ("bridge", "bridge"), ("torchtitan", "torchtitan"), ("torch", "torch-eager"),
       ("deepspeed", "deepspeed")]  # fmt: skip


def note_of(made: Plan, target: str) -> list[str]:
    return [note for note in bundle_of(made, target, force=True).notes if "priced for" in note]


@pytest.mark.parametrize(("target", "runtime"), OWN)
def test_a_plan_for_the_target_is_written_as_it_was_priced(planned: Planned, target: str, runtime: str) -> None:
    own = planned("llama-3.1-8b", 16, pp=1, runtime=runtime)
    assert priced_for(own, runtime) is own
    assert note_of(own, target) == []


@pytest.mark.parametrize(
    ("target", "runtime", "layout", "lost"),
    [
        ("torchtitan", "torchtitan", {"zero_stage": 3}, "overlap_grad_reduce=true"),
        ("torch", "torch-eager", {"pp": 2}, "overlap_param_gather=true"),
        ("deepspeed", "deepspeed", {}, "cross_entropy_fusion=native"),
    ],
)
def test_the_note_has_step_and_memory_under_the_target(
    planned: Planned, target: str, runtime: str, layout: dict[str, Any], lost: str
) -> None:
    """The same numbers as the layout has when it is evaluated for that trainer in the first place."""
    there, here = (planned("llama-3.1-8b", 16, runtime=name, **layout) for name in (runtime, "megatron"))
    if runtime == "torchtitan":
        assert there.parallelism.zero_stage == 3
    (note,) = note_of(here, target)
    used_gib = there.best.worst_stage.memory.total_bytes / GIB
    assert f"priced for {runtime}: {there.step.step_s:.4g} s a step, {used_gib:.1f} of" in note
    assert f"planned for megatron: {here.step.step_s:.4g} s" in note
    assert lost in note


def test_switches_that_the_target_has_stay(planned: Planned) -> None:
    made = planned("llama-3.1-8b", 16, features={"bf16_gradients": True, "optimizer_offload": 1.0})
    there = priced_for(made, "deepspeed").runtime_spec
    assert (there.gradient_bytes, there.optimizer_offload_fraction) == (2, 1.0)


def test_a_layout_that_no_longer_fits_is_refused_without_force(planned: Planned, tmp_path: Path) -> None:
    made = planned("llama-3.1-8b", 16, features={"optimizer_offload": 0.0})
    assert made.fits
    with pytest.raises(
        Infeasible, match=r"--to deepspeed: stage 0 .* 8\d\.\d of 79\.1 GiB, planned for megatron"
    ) as caught:
        export(made, "deepspeed", tmp_path / "run")
    assert caught.value.exit_code == 3
    assert caught.value.hint == "plan again with --runtime deepspeed, or add --force to write it anyway"
    assert not (tmp_path / "run").exists()
    *files, _ = export(made, "deepspeed", tmp_path / "run", force=True)
    assert files


def test_a_loss_that_the_command_line_refuses_is_priced_as_its_own(planned: Planned) -> None:
    """8,192 tokens of 128,256 logits: their softmax is 3.9 GiB in fp32, and Transformer Engine keeps none."""
    made = planned("llama-3.1-8b", 16, seq_length=8192, features={"cross_entropy_fusion": True})
    (note,) = note_of(made, "megatron")
    assert "cross_entropy_fusion=true" in note
    there = priced_for(made, "megatron")
    more_gib = (there.best.worst_stage.memory.total_bytes - made.best.worst_stage.memory.total_bytes) / GIB
    assert 1.0 < more_gib < 4.1
    text = bundle_of(made, "megatron").files[0].text
    assert "--cross-entropy-fusion-impl: native" in text
    assert 'cross_entropy_fusion_impl=\\"te' in bundle_of(made, "bridge").files[0].text


@pytest.mark.parametrize(("model", "gpus", "seq"), [("llama-3.1-8b", 8, 8192), ("gpt-oss-20b", 16, 4096)])
def test_no_plan_for_megatron_outgrows_its_own_export(model: str, gpus: int, seq: int) -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=gpus)
    training = TrainingSpec(seq_length=seq, global_batch_size=512)
    found = plan(load_model(model), cluster, training, limits=SearchLimits(top=1, time_limit_s=60))
    assert found.best.recipe["cross_entropy_fusion"] == "native"
    assert not any("not fit" in note or "priced for" in note for note in bundle_of(found, "megatron").notes)


def test_the_runner_keeps_what_it_cannot_recompute(planned: Planned) -> None:
    made = planned("llama-3.1-8b", 16, pp=2, recompute="selective", recompute_modules=("layernorm", "mlp"))
    again = priced_for(made, "torch-eager", ("core_attn", "mlp"))
    assert again.parallelism.recompute_modules == ("mlp",)
    assert any("does not recompute layernorm" in note for note in bundle_of(made, "torch", force=True).notes)


def test_bridge_runs_what_megatron_s_command_line_refuses() -> None:
    model, cluster = load_model("llama-3.1-8b"), ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training, layout = TrainingSpec(seq_length=8192, global_batch_size=64), Parallelism(pp=1, dp=8)
    bridge, megatron = (
        evaluate(model, cluster, training, layout, runtime=load_runtime(name)) for name in ("bridge", "megatron")
    )
    assert bridge.step.step_s < megatron.step.step_s
    assert bridge.best.worst_stage.memory.total_bytes < megatron.best.worst_stage.memory.total_bytes


def test_a_note_says_where_the_risk_grows_beyond_a_tenth(planned: Planned) -> None:
    """Eager torch keeps more than Megatron: on a GPU that holds it just so, the target runs out every third time."""
    made = planned("llama-3.1-8b", 16, pp=2)
    need_gib = priced_for(made, "torch-eager").best.worst_stage.memory.total_bytes / GIB
    risks = {}
    for spare in (1.02, 1.5):
        hardware = made.cluster.hardware.model_copy(update={"memory_gib": spare * need_gib})
        tighter = made.model_copy(update={"cluster": made.cluster.changed(hardware=hardware)})
        notes = [note for note in bundle_of(tighter, "torch").notes if "runs out of memory there" in note]
        risks[spare] = priced_for(tighter, "torch-eager").best.oom_probability or 0.0
        assert bool(notes) == (risks[spare] > 0.1)
        assert all(f"with a probability of {risks[spare]:.0%}, planned with" in note for note in notes)
    assert risks[1.02] > 0.1 > risks[1.5]
