"""Nothing that decides is dropped silently: the law over every importer, by samples of what people give it."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.export.import_run import read_configuration
from planner.export.imported_run import ImportedRun

_MEGATRON = """torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096
 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu
 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 256 --vocab-size 128256
 --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel
 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 2 --hidden-dropout 0.0
 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1""".replace("\n", " ")
_SWIFT = """NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --max_length 4096 --tensor_model_parallel_size 2
 --pipeline_model_parallel_size 2 --expert_model_parallel_size 4 --micro_batch_size 2 --global_batch_size 32
 --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --packing true --tuner_type lora
 --lora_rank 8 --target_modules all-linear --sequence_parallel true --overlap_grad_reduce true""".replace("\n", " ")
_LLAMAFACTORY = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
finetuning_type: lora
lora_rank: 16
lora_target: all
deepspeed: ds_z3_config.json
template: qwen
cutoff_len: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
flash_attn: fa2
enable_liger_kernel: true
"""
_NEOX = """pipe_parallel_size: 4
model_parallel_size: 2
num_layers: 44
hidden_size: 6144
num_attention_heads: 64
seq_length: 2048
max_position_embeddings: 2048
pos_emb: rotary
rotary_pct: 0.25
no_weight_tying: true
gpt_j_residual: true
zero_optimization: {stage: 1}
train_micro_batch_size_per_gpu: 4
gradient_accumulation_steps: 32
checkpoint_activations: true
fp16: {enabled: true}
padded_vocab_size: 50432
"""
_VERL = """python3 -m verl.trainer.main_ppo data.train_batch_size=128 data.max_prompt_length=1024
 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.n=4
 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
 actor_rollout_ref.actor.megatron.context_parallel_size=1
 +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
 +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
 +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
 trainer.n_gpus_per_node=8 trainer.nnodes=1""".replace("\n", " ")
_BRIDGE = """from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.common import _pretrain_common
def recipe_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B").to_megatron_provider()
    cfg.model.seq_length = 4096
    cfg.peft = LoRA(dim=8, target_modules=["linear_qkv"])
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.context_parallel_size = 1
    cfg.model.expert_model_parallel_size = 4
    cfg.model.sequence_parallel = True
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "uniform"
    cfg.model.recompute_num_layers = 1
    cfg.model.moe_token_dispatcher_type = "alltoall"
    cfg.mixed_precision = "bf16_mixed"
    cfg.ddp.overlap_grad_reduce = True
    cfg.train.global_batch_size = 32
    cfg.train.micro_batch_size = 1
    return cfg
"""
_TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
compile = true
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = "full"
"""


class Sample(NamedTuple):
    """A configuration, and how its keys are found in it."""

    source: str
    text: str
    key: str
    """A regular expression whose first group is a key."""


SAMPLES = (
    Sample("megatron", _MEGATRON, r"--([a-z][a-z0-9-]+)"),
    Sample("ms-swift", _SWIFT, r"--([a-z_]+)"),
    Sample("huggingface", _LLAMAFACTORY, r"(?m)^(\w+):"),
    Sample("neox", _NEOX, r"(?m)^(\w+):"),
    Sample("verl", _VERL, r"(actor_rollout_ref\.actor\.[\w.]+)="),
    Sample("bridge", _BRIDGE, r"cfg\.((?:model|ddp|train)\.\w+) = |cfg\.(peft|mixed_precision) = "),
    Sample("torchtitan", _TITAN, r"(?m)^(\w+) = "),
)
_HARMLESS = {
    "nproc",
    "nnodes",
    "template",
    "max-position-embeddings",
    "recompute-method",
    "recompute_method",
    "target_modules",
    "stage",
}
"""Keys without which nothing is another price, or the number of GPUs is asked for."""


def keys_of(sample: Sample) -> list[tuple[int, int]]:
    """The places of a sample's keys."""
    found = list(re.finditer(sample.key, sample.text))
    return [next(match.span(group + 1) for group in range(match.re.groups) if match[group + 1]) for match in found]


def read(text: str) -> ImportedRun | SpecError:
    """The run of a text with what users add, or why there is none."""
    try:
        imported = read_configuration(text)
        imported.complete(hardware="h100", num_gpus=imported.run.get("num_gpus") or 64)
    except SpecError as error:
        return error
    return imported


def says(found: ImportedRun | SpecError, key: str) -> bool:
    """The key is named, as unknown or in an error."""
    if isinstance(found, SpecError):
        return True
    told = [*found.unknown, *found.ignored, *found.unknown.values(), *found.notes]
    return any(key in text for text in told)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.source)
def test_samples_are_read_whole(sample: Sample) -> None:
    imported = read(sample.text)
    assert isinstance(imported, ImportedRun)
    assert imported.source == sample.source
    assert not imported.unknown
    assert not imported.refused


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.source)
def test_a_renamed_key_is_named(sample: Sample, data: st.DataObject) -> None:
    start, end = data.draw(st.sampled_from(keys_of(sample)))
    key = sample.text[start:end]
    suffix = data.draw(st.sampled_from(["x", "_new", "2"]))
    found = read(sample.text[:end] + suffix + sample.text[end:])
    last = re.split(r"[.]", key)[-1] + suffix
    assert says(found, last) or key in _HARMLESS, key


def without(text: str, start: int, end: int) -> str:
    """A text without a key and its value: its line, or its words on a command line."""
    if "\n" in text:
        return text[: text.rindex("\n", 0, start) + 1] + text[text.index("\n", end) + 1 :]
    begin = text.rindex(" ", 0, start)
    behind = re.search(r" (?=--|\+?\w+[\w.]*=)|$", text[end:])
    assert behind is not None
    return text[:begin] + text[end + behind.start() :]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.source)
def test_a_key_left_out_is_assumed_or_asked_for(sample: Sample) -> None:
    whole = read(sample.text)
    assert isinstance(whole, ImportedRun)
    silent = []
    for start, end in keys_of(sample):
        found = read(
            without(
                "\n" * ("\n" in sample.text) + sample.text, start + ("\n" in sample.text), end + ("\n" in sample.text)
            )
        )
        if isinstance(found, SpecError) or found.run == whole.run or found.refused:
            continue
        last = re.split(r"[.]", sample.text[start:end])[-1].replace("-", "_")
        named = " ".join([*found.assumed, *found.unknown, *found.notes]).replace("-", "_")
        if last not in named and found.run["model"] is not None:
            silent.append(last)
    assert not set(silent) - _HARMLESS
