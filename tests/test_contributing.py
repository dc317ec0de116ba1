"""The examples of CONTRIBUTING.md, followed: each file is written, loaded and planned with, and the rule is broken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from planner import ClusterSpec, Infeasible, RuntimeSpec, SearchLimits, TrainingSpec, load_runtime, plan
from planner.schedule.orders import SCHEDULES
from planner.trainers import load
from planner.trainers.rules.megatron import MEGATRON_RULES
from planner.trainers.rules.named import RULES
from planner.trainers.rules.of_trainer import rules_for
from planner.trainers.switches import SWITCHES

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
FILES = dict(re.findall(r"```yaml\n# \S+/(\S+)\n(.*?)```", TEXT, re.DOTALL))
TRAINING = TrainingSpec(seq_length=4096, global_batch_size=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_model_a_gpu_and_a_trainer_are_one_file_each(folder: Path) -> None:
    assert sorted(FILES) == ["my-gpu-96gb.yaml", "my-model-7b.yaml", "my-trainer.yaml"]
    cluster = ClusterSpec(hardware=str(folder / "my-gpu-96gb.yaml"), num_gpus=16)
    runtime = load_runtime(folder / "my-trainer.yaml")
    best = plan(str(folder / "my-model-7b.yaml"), cluster, TRAINING, runtime=runtime)
    assert (best.model.name, best.cluster.hardware.name, best.runtime) == ("my-model-7b", "my-gpu-96gb", "my-trainer")
    assert (best.runtime_spec.host_factor, best.runtime_spec.optimizer_bytes) == (1.6, 8)
    assert best.fits
    assert set(MEGATRON_RULES) <= set(rules_for(runtime))


def names_of(name: str) -> dict[str, Any]:
    """What the example that defines `name` defines."""
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if f"{name} = " in code)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_a_schedule_is_a_function_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = names_of("GROUPED_GPIPE")["GROUPED_GPIPE"]
    monkeypatch.setitem(SCHEDULES, kind.name, kind)
    runtime = RuntimeSpec(name="mine", trainer="torch-eager", schedules=("none", "1f1b", kind.name))
    cluster, limits = ClusterSpec(hardware="h100", num_gpus=8), SearchLimits(pp=(4,), tp=(1,), schedule=(kind.name,))
    best = plan("8b", cluster, TRAINING, limits=limits, runtime=runtime)
    assert best.parallelism.schedule == kind.name
    assert [stage.in_flight_microbatches for stage in best.stages] == [4.0] * 4
    usual = plan("8b", cluster, TRAINING, limits=limits.model_copy(update={"schedule": ("1f1b",)}), runtime=runtime)
    assert usual.step.step_s < best.step.step_s, "each group is filled and drained anew"


def test_a_switch_is_a_row_and_a_line_of_its_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = names_of("LATE_GATHERS")["LATE_GATHERS"]
    monkeypatch.setitem(SWITCHES, row.name, row)
    megatron = load._shipped_file("megatron")
    has = megatron._replace(switches={**megatron.switches, row.name: (False, True)})
    monkeypatch.setattr(load, "_shipped_file", lambda name: has)
    load._shipped_switches.cache_clear()
    try:
        cluster, layout = ClusterSpec(hardware="h100", num_gpus=16), {"tp": (1,), "pp": (1,)}
        free = plan("8b", cluster, TRAINING, limits=SearchLimits(**layout))
        pinned = plan("8b", cluster, TRAINING, limits=SearchLimits(**layout, switches={row.name: True}))
    finally:
        load._shipped_switches.cache_clear()
    assert (free.best.recipe[row.name], pinned.best.recipe[row.name]) == (False, True)
    assert pinned.runtime_spec.parameter_overlap_fraction == 0
    assert free.step.step_s < pinned.step.step_s


def test_a_rule_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = names_of("HIDDEN_SIZE")["HIDDEN_SIZE"]
    monkeypatch.setitem(RULES, "mine", lambda runtime: (rule,))
    runtime, limits = RuntimeSpec(name="mine", rules=("mine",)), SearchLimits(tp=(3,))
    with pytest.raises(Infeasible) as error:
        plan("8b", ClusterSpec(hardware="h100", num_gpus=6), TRAINING, limits=limits, runtime=runtime)
    assert rule.reason in error.value.rejections
