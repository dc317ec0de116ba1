"""planned_training.py: a program that trains a model of Hugging Face's under DeepSpeed, where there is no pipeline."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.run_settings import FIRST_RUN_STEPS, RunSettings
from planner.export.common.trainer_files import Placeholder, Requirement

TRAINING_FILE = "planned_training.py"
PLACEHOLDERS = (
    Placeholder("MODEL", "folder with the model's config.json, or its name at Hugging Face", in_first_run=True),
    Placeholder("DATA_PATH", "file of token ids: one dimension, as numpy.save writes it", kind="file"),
    Placeholder("CHECKPOINTS", "folder for checkpoints, which all nodes share", kind="new folder"),
)
REQUIREMENTS = (
    Requirement("torch", "everything", "torch", "2.4"),
    Requirement("deepspeed", "the trainer", "deepspeed", "0.16", "pip install deepspeed"),
    Requirement("transformers", "the model", "transformers", "4.50", "pip install transformers"),
    Requirement("accelerate", "transformers beside DeepSpeed", hint="pip install accelerate"),
    Requirement("numpy", "the data", hint="pip install numpy"),
)
LOG = "in the log: seconds of each step, and the first rank's peak in GiB (max_memory_allocated)"


def training_source(plan: Plan, run: RunSettings, config_file: str) -> str:
    """The program, which torchrun starts on every rank."""
    layout, training = plan.parallelism, plan.training
    dtype = "bfloat16" if training.dtype == "bf16" else "float16"
    shards = f"network = deepspeed.tp_model_init(network, {layout.tp}, torch.{dtype})" if layout.tp > 1 else ""
    recompute = "network.gradient_checkpointing_enable()" if layout.recompute == "full" else ""
    batch_size = ""
    if layout.tp > 1:
        batch_size = 'del CONFIG["train_batch_size"]  # DeepSpeed would count the ranks of TP as replicas\n'
    inside = "".join(f"    {line}\n" for line in (recompute, shards) if line)
    return f'''
import json
import os
import time
from pathlib import Path

import deepspeed
import numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

FIRST_RUN = os.environ.get("MOCK") == "1"
STEPS = {FIRST_RUN_STEPS} if FIRST_RUN else {run.num_steps}
SAVE_EVERY = {run.save_interval_steps}
SEQ_LENGTH = {training.seq_length}
TP = {layout.tp}
CONFIG = json.loads(Path(__file__).with_name("{config_file}").read_text())
{batch_size}SEQUENCES, PASSES = CONFIG["train_micro_batch_size_per_gpu"], CONFIG["gradient_accumulation_steps"]


def batch(ids, vocab_size, number, device):
    """The sequences of one pass on one rank; random tokens where there are no ids."""
    first = number * SEQUENCES
    if ids is None:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(vocab_size, (SEQUENCES, SEQ_LENGTH), generator=generator)
    else:
        starts = [(first + i) * SEQ_LENGTH % (len(ids) - SEQ_LENGTH) for i in range(SEQUENCES)]
        tokens = torch.from_numpy(numpy.stack([ids[start : start + SEQ_LENGTH] for start in starts]).astype("int64"))
    return tokens.to(device)


def build():
    """The model with random weights, which ZeRO-3 shards as they are made."""
    config = AutoConfig.from_pretrained(os.environ["MODEL"])
    sharded = HfDeepSpeedConfig(CONFIG)  # heeded while it lives
    network = AutoModelForCausalLM.from_config(config, dtype=torch.{dtype})
{inside}    network.train()
    return network, config.vocab_size, sharded


def main():
    deepspeed.init_distributed()
    network, vocab_size, _ = build()
    engine, *_ = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=CONFIG)
    replica, replicas = torch.distributed.get_rank() // TP, torch.distributed.get_world_size() // TP
    folder, first = os.environ.get("CHECKPOINTS"), 0
    if not FIRST_RUN and Path(folder, "latest").exists():
        _, state = engine.load_checkpoint(folder)
        first = state["step"]
    ids = None if FIRST_RUN else numpy.load(os.environ["DATA_PATH"], mmap_mode="r")
    for step in range(first, STEPS):
        began = time.perf_counter()
        for i in range(PASSES):
            number = (step * PASSES + i) * replicas + replica
            tokens = batch(ids, vocab_size, number, engine.device)
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        value = loss.item()  # waits for the device
        if torch.distributed.get_rank() == 0:
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0
            seconds = time.perf_counter() - began
            said = f"{{seconds:.3f}} s, loss {{value:.4f}}, peak {{peak:.1f}} GiB"
            print(f"step {{step + 1}} of {{STEPS}}: {{said}}", flush=True)
        if not FIRST_RUN and ((step + 1) % SAVE_EVERY == 0 or step + 1 == STEPS):
            engine.save_checkpoint(folder, client_state={{"step": step + 1}})


if __name__ == "__main__":
    main()
'''.lstrip("\n")
