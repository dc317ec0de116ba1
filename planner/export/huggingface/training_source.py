"""train.py: a short program that hands the exported files to TRL."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.run_settings import FIRST_RUN_STEPS
from planner.export.common.trainer_files import Placeholder, Requirement
from planner.export.huggingface.adapters import ADAPTER_FILE, QUANTIZATION_FILE
from planner.export.huggingface.names import repository_of
from planner.export.huggingface.training_arguments import ARGUMENTS_FILE

TRAINING_FILE = "train.py"
_TOKENS = """
        words = AutoConfig.from_pretrained(MODEL).get_text_config().vocab_size
        ids = torch.randint(words, (count, arguments.max_length), generator=torch.Generator().manual_seed(0))
        return Dataset.from_dict({"input_ids": ids.tolist()})
""".lstrip("\n")
_PAIRS = """
        answers = [" ".join([word] * arguments.max_length) for word in ("yes", "no")]
        return Dataset.from_list([{"prompt": "so", "chosen": answers[0], "rejected": answers[1]}] * count)
""".lstrip("\n")
"""The data of a first run: as many tokens as were priced."""
FIRST_RUN = ("--max_steps", str(FIRST_RUN_STEPS), "--save_strategy", "no")
"""Options of a first run."""
LOG = "in the log: seconds of each step, and the first rank's peak in GiB (max_memory_allocated)"


def placeholders_of(plan: Plan) -> tuple[Placeholder, ...]:
    """The values that the user fills in."""
    repository = repository_of(plan.model.spec) or ""
    says = "the model: its repository at Hugging Face, or a folder with its config.json, weights and tokenizer"
    return (
        Placeholder("MODEL", says, default=repository, in_first_run=True),
        Placeholder("DATASET", "the data: its repository at Hugging Face, or a .jsonl or .parquet file"),
        Placeholder("CHECKPOINTS", "folder for checkpoints, which all nodes share", kind="new folder"),
    )


def requirements_of(plan: Plan) -> tuple[Requirement, ...]:
    """The packages that every node must have."""
    adapters, attention = plan.training.adapters, plan.runtime_spec.attention_kernel
    needs = [
        Requirement("torch", "everything", "torch", "2.6"),
        Requirement("transformers", "the model", "transformers", "5.0", "pip install transformers"),
        Requirement("trl", "the trainer", "trl", "1.0", "pip install trl"),
        Requirement("accelerate", "the launch", "accelerate", "1.7", "pip install accelerate"),
        Requirement("datasets", "the data", hint="pip install datasets"),
    ]
    if adapters is not None:
        needs.append(Requirement("peft", "adapters", "peft", "0.17", "pip install peft"))
        if adapters.base_bits < 16:
            needs.append(
                Requirement("bitsandbytes", "packed weights", "bitsandbytes", "0.45", "pip install bitsandbytes")
            )
    if attention in ("flash", "flash1"):
        needs.append(Requirement("flash_attn", "attention", hint="pip install flash-attn --no-build-isolation"))
    return tuple(needs)


def training_source(plan: Plan) -> str:
    """The program, which `accelerate launch` starts on every rank, or Python on one."""
    adapters = plan.training.adapters
    packed = adapters is not None and adapters.base_bits < 16
    config = "BitsAndBytesConfig, " if packed else ""
    kind = "DPO" if plan.training.objective.name == "dpo" else "SFT"
    imports = [
        *(["from peft import LoraConfig"] if adapters is not None else []),
        f"from transformers import {'AutoConfig, ' if kind == 'SFT' else ''}{config}TrainerCallback",
        f"from trl import {kind}Config, {kind}Trainer, TrlParser",
    ]
    options = [
        *([f'peft_config=LoraConfig(**read("{ADAPTER_FILE}")),'] if adapters is not None else []),
        *([f'quantization_config=BitsAndBytesConfig(**read("{QUANTIZATION_FILE}")),'] if packed else []),
    ]
    sequences = f"{FIRST_RUN_STEPS} * arguments.train_batch_size * arguments.gradient_accumulation_steps"
    mock = _PAIRS if kind == "DPO" else _TOKENS
    listed, given = "\n".join(imports), "".join(f"        {option}\n" for option in options)
    return f'''
import os
import sys
import time
from pathlib import Path

import torch
import yaml
from datasets import Dataset, load_dataset
{listed}

MODEL, FIRST_RUN = os.environ["MODEL"], os.environ.get("MOCK") == "1"


def read(name):
    """The fields in a file beside this one; JSON is YAML, too."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text())


def examples(arguments):
    """The data: text, messages or prompts with completions; random tokens in a first run."""
    if FIRST_RUN:
        count = {sequences} * arguments.world_size
{mock}    name = os.environ["DATASET"]
    if Path(name).is_file():
        return load_dataset("parquet" if name.endswith(".parquet") else "json", data_files=name, split="train")
    return load_dataset(name, split="train")


class Steps(TrainerCallback):
    """Prints the seconds of each step, and the peak of the GPU's memory."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        peak = 0.0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30
        if state.is_world_process_zero:
            seconds = time.perf_counter() - self.began
            print(f"step {{state.global_step}}: {{seconds:.3f}} s, peak {{peak:.1f}} GiB", flush=True)


def main():
    options = {list(FIRST_RUN)} if FIRST_RUN else ["--output_dir", os.environ["CHECKPOINTS"]]
    # options of the command line stand in for those of the file
    words = ["--config", str(Path(__file__).with_name("{ARGUMENTS_FILE}")), *options, *sys.argv[1:]]
    (arguments,) = TrlParser([{kind}Config]).parse_args_and_config(words)
    trainer = {kind}Trainer(
        model=MODEL,
        args=arguments,
        train_dataset=examples(arguments),
        callbacks=[Steps()],
{given}    )
    saved = sorted(Path(arguments.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=bool(saved) and not FIRST_RUN)
    if not FIRST_RUN:
        trainer.save_model()


if __name__ == "__main__":
    main()
'''.lstrip("\n")
