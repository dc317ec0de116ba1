"""The tensors that a plan's stage keeps at its peak are those that torch holds, size by size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.layout.alive import explore  # noqa: E402
from planner.layout.evaluate import evaluate  # noqa: E402
from planner.layout.price import reprice  # noqa: E402
from planner.probe.run_price import in_eager_torch  # noqa: E402
from planner.specs.cluster import ClusterSpec  # noqa: E402
from planner.specs.registry import load_hardware  # noqa: E402
from planner.specs.training import Parallelism, TrainingSpec  # noqa: E402
from tools.counted_bytes import KEPT, BytesAlive, allocated, count_stage, stage_run  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.distributed.*is deprecated:FutureWarning"),
]


LARGE = 2**15
"""Bytes below which torch holds a few tensors that no list has, such as the state of a random generator."""


class SizesAlive(BytesAlive):
    """Notes the size of each tensor that forwards keep at the peak, too."""

    kept: Counter[int]

    def _see_peak(self, name: str, moment_bytes: int) -> None:
        if self.num_bytes + moment_bytes > self.peak_bytes:
            self.kept = Counter(size for label, size in self._storages.values() if label == KEPT)
        super()._see_peak(name, moment_bytes)


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("model", "sizes", "stage"),
    [
        ("llama-3.2-1b", {"tp": 2, "pp": 8, "dp": 1}, 7),
        ("llama-3.2-1b", {"tp": 2, "pp": 8, "dp": 1}, 0),
        ("deepseek-v2-lite", {"pp": 8, "ep": 2, "dp": 2}, 1),
    ],
    ids=["dense, the head", "dense, the embedding", "mixture with latent attention"],
)
def test_kept_tensors_are_those_that_torch_holds(
    model: str, sizes: dict[str, Any], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the embedding's whole output, of which the first norm's input is a view, and but for what is freed of the
    micro-batch whose backward is under way when torch's peak is reached."""
    made: list[SizesAlive] = []

    def account(*args: Any) -> SizesAlive:
        made.append(SizesAlive(*args))
        return made[-1]

    monkeypatch.setattr("tools.counted_bytes.BytesAlive", account)
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=16)
    training = TrainingSpec(seq_length=2048, global_batch_size=8)
    plan = evaluate(model, cluster, training, Parallelism(**sizes), runtime="torch-eager")
    eager = in_eager_torch(plan)
    planned = explore(eager, eager.best, reprice(eager, eager.best), (stage,)).stages[0]
    counted = count_stage(stage_run(plan, eager, stage), stage, "hopper")
    assert counted.peak_bytes == pytest.approx(planned.peak_bytes, rel=0.01)
    kept = [tensor for tensor in planned.tensors if tensor.item == "activations"]
    ours, theirs = Counter(allocated(tensor.bytes) for tensor in kept), made[0].kept
    of_microbatch: Counter[object] = Counter()
    for tensor in kept:
        of_microbatch[tensor.microbatch] += tensor.bytes
    views = [tensor for tensor in kept if tensor.name == "embedding: whole output"]
    assert {size for size in theirs - ours if size >= LARGE} <= {2 * tensor.bytes for tensor in views}
    freed = sum(size * number for size, number in (ours - theirs).items())
    assert freed <= max(of_microbatch.values()) + sum(2 * tensor.bytes for tensor in views)
