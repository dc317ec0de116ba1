"""Every launcher that is exported is read as the run that it starts, with nothing in it that is not understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.export.import_run import read_configuration

Planned = Callable[..., Plan]

FILES = ("launch.sh", "launch.sbatch", "kubernetes.yaml", "kubernetes-pytorchjob.yaml")
LAUNCHERS = ["torchrun", "slurm", "kubernetes", "kubernetes-pytorchjob"]
JOBS: dict[str, dict[str, Any]] = {
    "dense": {"model": "llama-3.1-70b", "gpus": 64, "tp": 4, "pp": 4, "vpp": 2},
    "mixture": {"model": "qwen3-30b-a3b", "gpus": 16, "ep": 8},
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("target", ["megatron", "bridge"])
def test_a_launcher_comes_back(planned: Planned, target: str, job: str) -> None:
    plan = planned(runtime=target, **JOBS[job])
    texts = {file.name: file.text for file in bundle_of(plan, [target, *LAUNCHERS]).files}
    for name in FILES:
        imported = read_configuration(texts[name])
        assert (name, imported.source, imported.unknown) == (name, target, {})
        assert imported.run["num_gpus"] == plan.parallelism.num_gpus_used, name
        assert imported.run["global_batch_size"] == plan.training.global_batch_size
        layout = imported.run["parallelism"]
        assert (layout["tp"], layout["pp"], layout["ep"]) == (
            plan.parallelism.tp,
            plan.parallelism.pp,
            plan.parallelism.ep,
        )
