"""Accelerate's configurations and arguments of Hugging Face's Trainer become the part of a run that they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from samples import layout_of
from tables import beside

from planner.decide.check import judged
from planner.errors import SpecError
from planner.export.huggingface.tuning_settings import read_adapters
from planner.export.import_run import read, read_configuration
from planner.layout.runs import parse_run
from planner.specs.base import Fields
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model

TABLES = beside(__file__)

OFFLOADED = {"optimizer_offload": 1.0, "parameter_offload": True}


def test_accelerate_with_fsdp() -> None:
    imported = read_configuration(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\n"
        "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n  fsdp_activation_checkpointing: true\n"
        "  fsdp_offload_params: true\n"
    )
    assert (imported.source, imported.run["runtime"], imported.run["num_gpus"]) == ("accelerate", "torch-fsdp", 16)
    layout = layout_of(imported)
    assert (layout["zero_stage"], layout["fsdp"], layout["recompute"]) == (3, 8, "full")
    assert not imported.unknown
    assert imported.run["features"] == {"parameter_offload": "all"}


@pytest.mark.parametrize(("strategy", "stage"), TABLES["strategies_of_fsdp"])
def test_strategies_of_fsdp(strategy: str, stage: int) -> None:
    imported = read_configuration(f"distributed_type: FSDP\nfsdp_config: {{fsdp_sharding_strategy: {strategy}}}\n")
    assert layout_of(imported)["zero_stage"] == stage


def test_accelerate_with_deepspeed(tmp_path: Path) -> None:
    inline = read_configuration(
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: fp16\n"
        "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4, offload_optimizer_device: cpu}\n"
    )
    assert (inline.run["runtime"], inline.run["dtype"], layout_of(inline)["zero_stage"]) == ("deepspeed", "fp16", 2)
    assert inline.run["features"]["optimizer_offload"] == 1.0
    assert inline.complete(hardware="h100", model="llama-2-7b", seq_length=4096)["global_batch_size"] == 32
    (tmp_path / "accelerate_config.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n")
    (tmp_path / "a.sh").write_text("accelerate launch a.py --model_name_or_path Qwen/Qwen3-8B --fsdp_save_full true\n")
    assert layout_of(read(tmp_path / "a.sh"))["zero_stage"] == 2
    (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero3.json}\n"
    )
    assert layout_of(read(tmp_path / "a.yaml"))["zero_stage"] == 3
    with pytest.raises(SpecError, match="is not beside the file"):
        read_configuration("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero3.json}\n")
    with pytest.raises(SpecError, match=r"grpo-8K\.yaml is not beside the file"):
        read_configuration("defaults: grpo-8K.yaml\npolicy:\n  max_total_sequence_length: 16384\n", "nemo-rl")


def test_accelerate_with_megatron() -> None:
    imported = read_configuration(
        "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config: {megatron_lm_tp_degree: 2, "
        "megatron_lm_pp_degree: 2, megatron_lm_num_micro_batches: 4, megatron_lm_sequence_parallelism: true}\n"
    )
    layout = layout_of(imported)
    assert (
        imported.run["runtime"], layout["tp"], layout["pp"], layout["sequence_parallel"],
    ) == ("megatron", 2, 2, True)  # fmt: skip


ARGUMENTS = (
    "--model_name_or_path meta-llama/Llama-2-7b-hf --do_train --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 8 --block_size 2048 --bf16 --gradient_checkpointing --output_dir /tmp/x"
)


def test_a_command_line_with_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
        )
    )
    (tmp_path / "run.sh").write_text(
        f"deepspeed --num_gpus 8 run_clm.py --deepspeed ds.json {ARGUMENTS} --optim lion_32bit\n"
    )
    imported = read(tmp_path / "run.sh")
    run, layout = imported.run, layout_of(imported)
    assert (run["model"], run["runtime"], run["num_gpus"]) == ("llama-2-7b", "hf", 8)
    assert (layout["zero_stage"], layout["micro_batch_size"], layout["recompute"]) == (3, 4, "full")
    assert imported.complete(hardware="a100")["global_batch_size"] == 256
    assert imported.unknown == {"optim": "lion_32bit"}


def test_a_command_line_with_fsdp_and_adapters() -> None:
    imported = read_configuration(
        f"torchrun --nproc_per_node 8 run_clm.py {ARGUMENTS} --fsdp 'shard_grad_op auto_wrap' --use_peft --lora_r 16\n"
    )
    assert (imported.run["runtime"], layout_of(imported)["zero_stage"]) == ("hf", 2)
    # peft's own targets for a model of Llama's, where nothing names them
    assert imported.run["adapters"] == {"rank": 16, "targets": ["q_proj", "v_proj"], "base_bits": 16}
    assert not imported.unknown


def test_arguments_in_python_and_in_yaml() -> None:
    python = read_configuration(TABLES["arguments_in_python_and_in_yaml"])
    assert (python.run["model"], layout_of(python)["zero_stage"], python.run["seq_length"]) == ("qwen3-8b", 3, 4096)
    assert python.complete(hardware="h100", num_gpus=16)["global_batch_size"] == 128
    axolotl = read_configuration(
        "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 8192\nmicro_batch_size: 1\ngradient_accumulation_steps: 2\n"
        "bf16: auto\nadapter: lora\ndeepspeed: deepspeed_configs/zero3_bf16.json\n"
        "plugins:\n- axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n"
    )
    assert (axolotl.run["model"], layout_of(axolotl)["zero_stage"]) == ("llama-3.1-8b", 3)
    assert (axolotl.run["adapters"]["base_bits"], axolotl.run["features"]["liger"]) == (16, "loss")
    assert not axolotl.unknown


_SFT = "--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --bf16 --max_seq_length 4096"


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        *TABLES["a_command_line_is_read_as_its_launcher_and_tool_take_it"],
        (
            f"accelerate launch --num_processes 8 --use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP "
            f"--fsdp_activation_checkpointing true sft.py {_SFT}",
            {"zero_stage": 2, "recompute": "full", "sharding": "fsdp"},
        ),
        (
            f"accelerate launch --num_processes 8 --use_deepspeed --zero_stage 3 --offload_optimizer_device cpu "
            f"x.py {_SFT}",
            {"zero_stage": 3, "sharding": "deepspeed", "optimizer_offload": 1.0},
        ),
        (f"swift sft {_SFT} --deepspeed zero3_offload", {"zero_stage": 3, "sharding": "deepspeed", **OFFLOADED}),
        (f"swift sft {_SFT} --deepspeed zero2_offload", {"zero_stage": 2, "optimizer_offload": 1.0}),
        (
            f"accelerate launch --config_file configs/zero3.yaml sft.py {_SFT}",
            {"zero_stage": 3, "sharding": "deepspeed"},
        ),
        (f"trl sft {_SFT} --dataset_name x", {"recompute": "full"}),
    ],
)
def test_a_command_line_is_read_as_its_launcher_and_tool_take_it(command: str, fields: dict[str, Any]) -> None:
    imported = read_configuration(command)
    run = imported.run
    found = {
        **run["parallelism"], **run["features"], "seq_length": run["seq_length"], "weights": run["runtime"],
        "adapters": (run.get("adapters") or {}).get("rank"), "unknown": [*imported.unknown],
    }  # fmt: skip
    assert found.items() >= {"unknown": [], **fields}.items()
    assert ("liger" in found) is ("liger" in fields)


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        *TABLES["a_variable_of_the_surroundings_is_asked_for_by_name"],
        (f"accelerate launch sft.py {_SFT} --gradient_accumulation_steps $ACC_STEPS", "ACC_STEPS"),
    ],
)
def test_a_variable_of_the_surroundings_is_asked_for_by_name(command: str, variable: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_configuration(command).complete(num_gpus=8)
    assert f"--set {variable}=" in refused.value.hint


_CELLS = {
    "a shell's command": ["!pip install trl", "!accelerate launch sft.py " + _SFT.replace(" --bf16", "\\\n--bf16")],
    "a trainer's call": ["!pip install trl", "from trl import SFTTrainer, SFTConfig\nSFTTrainer(model='Qwen/Qwen3-8B', "
                        "args=SFTConfig(per_device_train_batch_size=1, bf16=True, max_length=4096))"],
}  # fmt: skip


@pytest.mark.parametrize("how", _CELLS)
def test_a_notebook_trains_by_a_command_or_by_a_call(how: str) -> None:
    cells = [{"cell_type": "code", "source": [source]} for source in _CELLS[how]]
    run = read_configuration(json.dumps({"cells": cells, "nbformat": 4})).run
    assert (run["model"], run["seq_length"], run["parallelism"]["micro_batch_size"]) == ("qwen3-8b", 4096, 1)


def test_a_line_of_a_cell_that_goes_on_has_a_space() -> None:
    run = read_configuration("!sudo python3 -m verl.trainer.main_ppo data.train_batch_size=64\\\n"
                             "actor_rollout_ref.model.path=Qwen/Qwen3-8B\\\ntrainer.n_gpus_per_node=4").run  # fmt: skip
    assert (run["model"], run["num_gpus"]) == ("qwen3-8b", 4)


def test_a_model_named_by_the_user_stands_for_a_variable() -> None:
    imported = read_configuration("swift sft --model ${MODEL_PATH} --max_length 2048")
    assert imported.complete(hardware="h100", num_gpus=8, model="qwen3-8b")["model"] == "qwen3-8b"


@pytest.mark.parametrize(("command", "blocks"), TABLES["further_tokens_are_predicted_only_where_it_is_asked_for"])
def test_further_tokens_are_predicted_only_where_it_is_asked_for(command: str, blocks: int) -> None:
    model = read_configuration(command).complete(hardware="h200", num_gpus=8)["model"]
    assert (load_model(model) if isinstance(model, str) else ModelSpec(**model)).num_nextn_predict_layers == blocks


@pytest.mark.parametrize(
    ("model", "more", "is_fused"), TABLES["caps_and_sinks_are_no_kernel_s_where_none_is_asked_for"]
)
def test_caps_and_sinks_are_no_kernel_s_where_none_is_asked_for(model: str, more: str, is_fused: bool) -> None:
    command = f"torchrun --nproc_per_node 8 sft.py --model_name_or_path {model} --bf16 --max_length 4096{more}"
    run = read_configuration(command).run
    assert run["features"].get("flash_attention", True) == is_fused


@pytest.mark.parametrize(("path", "name", "bits"), TABLES["names_that_people_give_are_of_models_that_are_known"])
def test_names_that_people_give_are_of_models_that_are_known(path: str, name: str | None, bits: int) -> None:
    run = read_configuration(f"swift sft --model {path} --max_length 2048").run
    assert (run["model"], run["adapters"]["base_bits"]) == (name, bits)


_VERL = (
    "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B trainer.n_gpus_per_node=8 "
    "data.max_prompt_length=512 data.max_response_length=1536 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 "
)
_OPENRLHF = (
    "deepspeed --module openrlhf.cli.train_ppo --pretrain Qwen/Qwen3-8B --prompt_max_len 512 --generate_max_len 1536 "
    "--micro_rollout_batch_size 32 --train_batch_size 128 "
)
_NEMO_RL = (
    "policy:\n  model_name: Qwen/Qwen3-8B\n  train_global_batch_size: 64\n  train_micro_batch_size: 1\n"
    "  max_total_sequence_length: 4096\n  logprob_batch_size: 8\n  dtensor_cfg: {enabled: true%s}\ngrpo: {}\n"
)


@pytest.mark.parametrize(
    ("text", "scored"),
    [
        *TABLES["log_probabilities_between_updates_are_priced"],
        (_VERL + "data.train_files=~/data/gsm8k/train.parquet", (5120, False)),
        (_VERL + "actor_rollout_ref.model.use_remove_padding=False", (32768, False)),
        (_VERL + "actor_rollout_ref.actor.use_dynamic_bsz=True", (16384, False)),
        (
            _VERL + "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu="
            "24000 actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
            (24000, True),
        ),
        (_VERL + "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.model.use_fused_kernels=True", None),
        (_NEMO_RL.replace("logprob_batch_size: 8", "logprob_chunk_size: 1024") % "", None),
    ],
)
def test_log_probabilities_between_updates_are_priced(text: str, scored: Any) -> None:
    found = read_configuration(text).run.get("objective", {})
    assert [found.get("scored_tokens"), found.get("scored_alone", False)] == [*(scored or (None, False))]


_GRPO = (
    "from trl import GRPOConfig, GRPOTrainer\na = GRPOConfig(per_device_train_batch_size=8, use_vllm=True%s)\n"
    "GRPOTrainer(model='Qwen/Qwen3-8B', args=a).train()\n"
)


@pytest.mark.parametrize(
    ("text", "beside"),
    [*TABLES["models_on_the_same_gpus_are_counted"],
        (_VERL, {"rollout_fraction": 0.5, "critics": 1}),
        (_VERL + "algorithm.adv_estimator=grpo actor_rollout_ref.actor.fsdp_config.param_offload=True", {}),
        (_VERL + "actor_rollout_ref.rollout.gpu_memory_utilization=0.8 critic.model.fsdp_config.optimizer_offload=True",
         {"rollout_fraction": 0.8}),
        (_VERL + "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.use_kl_loss=1",
         {"rollout_fraction": 0.5, "critics": 1, "frozen_copies": 1}),
        (_OPENRLHF.replace("train_ppo", "train_ppo_ray") + "--colocate_actor_ref", {"frozen_copies": 1}),
        (_OPENRLHF.replace("train_ppo", "train_ppo_ray") + "--colocate_all_models --advantage_estimator rloo "
         "--remote_rm_url http://x --vllm_enable_sleep", {"frozen_copies": 1, "rollout_fraction": 0.95})],
)  # fmt: skip
def test_models_on_the_same_gpus_are_counted(text: str, beside: dict[str, float]) -> None:
    found = read_configuration(text).run["objective"]
    assert {name: value for name, value in found.items() if not name.startswith("scored")} == beside


@pytest.mark.parametrize(("call", "objective", "length", "micro"), TABLES["a_trainer_says_what_is_learned"])
def test_a_trainer_says_what_is_learned(call: str, objective: Fields | None, length: int, micro: int) -> None:
    imported = read_configuration(
        f"from trl import {call}Config, {call}Trainer\na = {call}Config(per_device_train_batch_size=4)\n"
        f"{call}Trainer(model='Qwen/Qwen3-8B', args=a).train()\n"
    )
    run = imported.run
    assert (run.get("objective"), run["seq_length"], run["parallelism"]["micro_batch_size"]) == (
        objective,
        length,
        micro,
    )
    assert "liger" not in run["features"], "its loss comes in no chunks"


@pytest.mark.parametrize(("more", "length", "micro"), TABLES["sequences_without_padding_are_as_long_as_in_the_mean"])
def test_sequences_without_padding_are_as_long_as_in_the_mean(more: str, length: int, micro: int) -> None:
    run = read_configuration(_VERL + more).run
    assert (run["seq_length"], run["parallelism"]["micro_batch_size"]) == (length, micro)


def test_one_gpu_is_refused_by_no_trainer_that_shards() -> None:
    imported = read_configuration(
        "swift sft --model Qwen/Qwen3-8B --tuner_type full --max_length 2048 --deepspeed zero3"
    )
    run = parse_run({"run": imported.complete(hardware="h20", num_gpus=1)}, "x")
    plan, refused = judged(run)
    assert refused == []
    assert not plan.fits


def test_a_program_that_a_launcher_starts_keeps_its_loss_where_sequences_are_split(tmp_path: Path) -> None:
    (tmp_path / "cp.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_cp_size: 8}\n"
    )
    (tmp_path / "sft.py").write_text(
        "from trl import SFTConfig, SFTTrainer\na = SFTConfig(max_length=1048576, packing=True, "
        "per_device_train_batch_size=1, gradient_checkpointing=True, gradient_checkpointing_kwargs={'offload': True})\n"
        "SFTTrainer(model='Qwen/Qwen3-8B', args=a).train()\n"
    )
    (tmp_path / "run.sh").write_text("accelerate launch --config_file cp.yaml sft.py\n")
    imported = read(tmp_path / "run.sh")
    assert layout_of(imported).items() >= {"cp": 8, "zero_stage": 3, "recompute": "full"}.items()
    told = {"liger": "loss", "cpu_offloading_num_layers": 36, "attention_kernel": "fastest"}
    assert imported.run["features"].items() >= told.items()
    # 36 layers' inputs of 131,072 tokens, which 8 GPUs of 80 GB have no room for
    peak = judged(parse_run({"run": imported.complete(hardware="h100")}, "run"))[0].best.worst_stage.memory
    assert peak.activations_bytes < 5e9 < 36 * 131072 * 4096 * 2


def test_a_programs_own_file_stands_behind_it_and_the_launchers_before_it(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_processes: 2\nmixed_precision: bf16\n"
    )
    (tmp_path / "full.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 1024\nper_device_train_batch_size: 1\nbf16: true\n"
    )
    command = "accelerate launch --config_file zero3.yaml {}scripts/run_dpo.py full.yaml\n"
    for said, gpus in (("", 2), ("--num_processes 4 ", 4)):  # the launch's own words before its file's
        (tmp_path / "run.sh").write_text(command.format(said))
        run = read(tmp_path / "run.sh").run
        assert (run["num_gpus"], run["seq_length"], run["parallelism"]["zero_stage"]) == (gpus, 1024, 3)


_ROLL = TABLES["_roll"]


@pytest.mark.parametrize(("strategy", "said", "runtime", "batch", "layout"), TABLES["a_worker_of_roll_is_a_run"])
def test_a_worker_of_roll_is_a_run(strategy: str, said: str, runtime: str, batch: int, layout: dict[str, Any]) -> None:
    imported = read_configuration(_ROLL % (strategy, said))
    run = imported.complete(hardware="h100")
    assert (imported.source, run["runtime"], run["num_gpus"], run["seq_length"]) == ("roll", runtime, 16, 6144)
    assert (run["global_batch_size"], run["objective"]["scored_tokens"]) == (batch, 4 * 6144)
    assert {name: run["parallelism"].get(name) for name in layout} == layout
    assert imported.unknown == {}


_TRAINED_WHOLE = "TrainingArguments(per_device_train_batch_size=1, bf16=True)\n"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [*TABLES["defaults_of_trainers_are_theirs"],
        ("from transformers import AutoModelForCausalLM, TrainingArguments\nm = AutoModelForCausalLM.from_pretrained("
         f"'Qwen/Qwen3-8B', torch_dtype=torch.bfloat16)\na = {_TRAINED_WHOLE}", "runtime", "hf"),
        ("from transformers import TrainingArguments\nmodel_name = 'Qwen/Qwen3-8B'\n"
         f"a = {_TRAINED_WHOLE}", "features", {"autocast": True}),
        ("from unsloth import FastModel\nm, t = FastModel.from_pretrained(model_name='Qwen/Qwen3-8B')\n"
         f"a = {_TRAINED_WHOLE}", "num_gpus", 1),
        *((f"NPROC_PER_NODE=8 megatron rlhf --model Qwen/Qwen3-8B --global_batch_size 16 --rlhf_type {stage}", *found)
          for stage, found in (
              ("dpo", ("objective", {"name": "dpo", "reference": "model"})),
              ("dpo --tuner_type lora", ("objective", {"name": "dpo", "reference": "adapters"})),
              ("dpo", ("global_batch_size", 32)), ("rm --packing true", ("global_batch_size", 16)),
              ("kto", ("global_batch_size", 16)),
          ))],
)  # fmt: skip
def test_defaults_of_trainers_are_theirs(text: str, field: str, value: Any) -> None:
    assert read_configuration(text).run[field] == value


@pytest.mark.parametrize(("batch", "gpus", "sequences"), [(1, 4, 16), (3, 4, 24), (4, 8, 32)])
def test_ms_swift_unasked_has_sixteen_examples_a_step(batch: int, gpus: int, sequences: int) -> None:
    words = f"--max_length 2048 --per_device_train_batch_size {batch}"
    text = f"NPROC_PER_NODE={gpus} swift sft --model Qwen/Qwen3-8B {words}"
    assert read_configuration(text).complete(hardware="h100")["global_batch_size"] == sequences
    told = read_configuration(f"{text} --gradient_accumulation_steps 1").complete(hardware="h100")
    assert told["global_batch_size"] == batch * gpus


@pytest.mark.parametrize(
    ("pattern", "targets", "is_known"),
    [
        (r"model.layers.[\d]+.(mlp|self_attn).(up|down|q|o)_proj", {"up_proj", "down_proj", "q_proj", "o_proj"}, True),
        (r"^(?!.*visual).*\.(?:q_proj|v_proj)$", {"q_proj", "v_proj"}, True),
        (
            r".*\.layers\.(3|7)\.self_attn\.(q|v)_proj|.*\.mlp\.(gate|up)_proj",
            {"q_proj", "v_proj", "gate_proj", "up_proj"},
            False,
        ),
        ("(a|b)" * 60, {"all-linear"}, False),
    ],
)
def test_patterns_of_modules_name_their_ends(pattern: str, targets: set[str], is_known: bool) -> None:
    adapters, unknown = read_adapters({"r": 8, "target_modules": pattern})
    assert (set(adapters["targets"]), not unknown) == (targets, is_known)
