"""Parameters and bytes of fine-tuning, counted on models of transformers and peft, are those that the planner says."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the hf extra (transformers, peft)")
pytest.importorskip("peft", reason="needs the hf extra (transformers, peft)")

from finetuning_jobs import Job, planned

TOLERANCE = 0.01
QUICK = (
    Job("Llama 3.1 8B", 512, num_layers=2),
    Job("Llama 3.1 8B", 1024, rank=16, num_layers=2),
    Job("Llama 3.2 1B", 512, 2, 2, checkpointing=True, num_layers=2),
    Job("Qwen2.5 7B", 512, rank=32, base_bits=4, num_layers=2),
    Job("Qwen3 8B", 512, 2, rank=8, targets=("q_proj", "v_proj"), dropout=0.05, num_layers=2),
    Job("Mistral 7B", 2048, rank=64, base_bits=4, checkpointing=True, num_layers=2),
)


@pytest.mark.parametrize("job", QUICK, ids=lambda job: job.name)
@pytest.mark.filterwarnings("ignore")
def test_a_step_takes_what_the_planner_says(job: Job) -> None:
    from counted_models import count

    if job.base_bits == 4:
        pytest.importorskip("bitsandbytes", reason="needs the hf extra (bitsandbytes)")
    counted, plan = count(job), planned(job)
    assert (plan.parameters, plan.trained_parameters) == (counted.parameters, counted.trained_parameters)
    kept = plan.kept_bytes
    if job.rank and not job.checkpointing:
        # no gradient goes back to a frozen embedding: the first norm keeps no copy of its input in fp32
        kept -= 4 * job.micro_batch_size * job.seq_length * job.config["hidden_size"]
    if job.dropout:
        # nor do dropouts that read this norm's output keep a mask
        kept -= len(job.targets) * job.micro_batch_size * job.seq_length * job.config["hidden_size"]
    assert kept == pytest.approx(counted.kept_bytes, rel=TOLERANCE)
    assert plan.peak_bytes == pytest.approx(counted.peak_bytes, rel=TOLERANCE)
