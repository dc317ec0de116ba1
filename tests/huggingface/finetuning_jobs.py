"""Steps of fine-tuning that are counted on real models, and what the planner says of the same steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planner.layout.evaluate import priced_as_given
from planner.specs.architectures import from_config
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import AdapterSpec, Parallelism, TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.stated import switched

CONFIGS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("configs.yaml").read_text())
"""Published configs by their names."""


@dataclass(frozen=True)
class Job:
    """A step of fine-tuning on one GPU."""

    model: str
    seq_length: int = 512
    micro_batch_size: int = 1
    num_microbatches: int = 1
    rank: int = 0
    """Rank of the adapters; 0 for full fine-tuning."""
    targets: tuple[str, ...] = ("all-linear",)
    base_bits: int = 16
    dropout: float = 0.0
    checkpointing: bool = False
    num_layers: int = 0
    """Layers of the model; 0 for all of the config's."""

    @property
    def config(self) -> dict[str, Any]:
        config = CONFIGS[self.model]
        return config | ({"num_hidden_layers": self.num_layers} if self.num_layers else {})

    @property
    def name(self) -> str:
        way = "full"
        if self.rank:
            way = f"{'QLoRA' if self.base_bits == 4 else 'LoRA'} r={self.rank}"
            way += "" if self.targets == ("all-linear",) else f" {'+'.join(name[0] for name in self.targets)}"
            way += f" dropout {self.dropout:g}" if self.dropout else ""
        batches = f"{self.micro_batch_size} × {self.seq_length}"
        batches += f", {self.num_microbatches} micro-batches" if self.num_microbatches > 1 else ""
        return f"{self.model}, {way}, {batches}{', checkpointing' if self.checkpointing else ''}"


@dataclass(frozen=True)
class Figures:
    """Parameters and bytes of a job."""

    parameters: int
    """All parameters, those of adapters included."""
    trained_parameters: int
    static_bytes: int
    """Bytes between two steps: weights and optimizer; gradients are freed then."""
    kept_bytes: int
    """Bytes that a forward and its loss leave behind for the backward."""
    peak_bytes: int


def planned(job: Job) -> Figures:
    """The figures of the planner."""
    adapters = None
    if job.rank:
        adapters = AdapterSpec(
            rank=job.rank,
            targets=job.targets,
            base_bits=job.base_bits,  # type: ignore[arg-type]
            dropout=job.dropout,
        )
    batch = job.micro_batch_size * job.num_microbatches
    training = TrainingSpec(seq_length=job.seq_length, global_batch_size=batch, adapters=adapters)
    layout = Parallelism(
        micro_batch_size=job.micro_batch_size, zero_stage=0, recompute="full" if job.checkpointing else "none"
    )
    cluster = ClusterSpec(hardware=load_hardware("h200"), num_gpus=1)
    model = from_config(job.config, job.model)
    candidate, priced = priced_as_given(
        model, cluster, training, layout, switched(load_runtime("hf"), {"liger": False})
    )
    totals, memory = candidate.pricing.totals, priced.stages[0].memory
    trained = totals.num_trained_parameters
    return Figures(
        parameters=totals.num_parameters + (trained if job.rank else 0), trained_parameters=trained,
        static_bytes=memory.weights_bytes + memory.optimizer_bytes, kept_bytes=memory.activations_bytes,
        peak_bytes=memory.peak_allocated_bytes,
    )  # fmt: skip


def _ways(model: str, num_layers: int = 0, **common: Any) -> tuple[Job, ...]:
    """Full fine-tuning, LoRA and QLoRA of a model, each with and without checkpointing."""
    each = ({}, {"rank": 16}, {"rank": 16, "base_bits": 4})
    return tuple(
        Job(model, num_layers=num_layers, checkpointing=checkpointing, **common, **way)
        for way in each
        for checkpointing in (False, True)
    )


TABLE = (
    *_ways("Llama 3.1 8B", seq_length=2048), Job("Llama 3.1 8B", 512, rank=8, targets=("q_proj", "v_proj")),
    Job("Llama 3.1 8B", 4096, 4, rank=64, checkpointing=True),
    Job("Llama 3.1 8B", 1024, 4, rank=64, base_bits=4, dropout=0.05),
    Job("Llama 3.1 8B", 4096, rank=32, dropout=0.05), Job("Llama 3.1 8B", 1024, 2, 4),
    *_ways("Llama 3.2 1B", seq_length=1024, micro_batch_size=4), *_ways("Qwen2.5 7B", seq_length=1024),
    *_ways("Qwen3 8B", seq_length=4096), *_ways("Mistral 7B", seq_length=2048, micro_batch_size=2),
)  # fmt: skip
"""The jobs of the table in the docs."""
QUICK = tuple(job for model in CONFIGS for job in _ways(model, num_layers=2))
"""Jobs of models of two layers at their real widths."""
