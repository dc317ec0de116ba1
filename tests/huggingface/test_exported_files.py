# ruff: noqa: E402
"""The files of `plan export --to hf` against the packages that take them, and a job that they run."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import beside

for package in ("transformers", "trl", "peft", "accelerate", "datasets"):
    pytest.importorskip(package)

import torch
import transformers
import trl
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, LlamaConfig

from planner.answer import Plan
from planner.export.export import export
from planner.export.huggingface.trl_files import _LAYER_CLASSES, deepspeed_config
from planner.export.huggingface.tuning_settings import OPTIMIZERS
from planner.layout.evaluate import evaluate, pricing_of
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware
from planner.specs.training import AdapterSpec, Parallelism, TrainingSpec
from planner.trainers.load import load_runtime

TABLES = beside(__file__)

# their own, about what they deprecate and about machines without a GPU
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = TABLES["sizes"]
JOBS: dict[str, dict[str, Any]] = TABLES["jobs"]


def _plan(adapters: dict[str, Any] | None = None, tokens: float | None = None, **layout: Any) -> Plan:
    gpus = layout.get("dp", 1)
    training = {"seq_length": 64, "global_batch_size": 4 * gpus, "adapters": adapters, "tokens": tokens}
    return evaluate(
        ModelSpec(name="tiny", source="config.json of hub/tiny-Llama-3", rope_theta=1e4, **SIZES),
        ClusterSpec(hardware=load_hardware("h100"), num_gpus=gpus), TrainingSpec.model_validate(training),
        Parallelism.model_validate({"micro_batch_size": 2, "zero_stage": 0, **layout}), runtime="hf",
    )  # fmt: skip


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Plan, Path]:
    """A plan, and the folder of its export."""
    plan = _plan(**JOBS[request.param])
    export(plan, "hf", tmp_path / "run")
    return plan, tmp_path / "run"


def _read(folder: Path, name: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((folder / name).read_text())
    return data


def test_training_arguments_are_trls_and_transformers(job: tuple[Plan, Path]) -> None:
    plan, folder = job
    settings = _read(folder, "training_arguments.yaml")
    (arguments,) = HfArgumentParser(trl.SFTConfig).parse_dict(settings | {"use_cpu": True})
    steps = arguments.gradient_accumulation_steps * plan.parallelism.dp
    assert arguments.per_device_train_batch_size * steps == plan.training.global_batch_size
    assert arguments.max_length == plan.training.seq_length
    assert arguments.gradient_checkpointing is (plan.parallelism.recompute == "full")
    own = {name for name in settings if name in transformers.TrainingArguments.__dataclass_fields__}
    assert {"optim", "bf16", "warmup_steps", "save_steps"} <= own
    transformers.TrainingArguments(**{name: settings[name] for name in own}, use_cpu=True)


def test_every_optimizer_is_one_of_transformers() -> None:
    assert set(OPTIMIZERS.values()) <= {name.value for name in transformers.training_args.OptimizerNames}


def test_adapters_are_pefts_and_as_many_as_planned(job: tuple[Plan, Path]) -> None:
    plan, folder = job
    adapters = plan.training.adapters
    if adapters is None:
        assert not (folder / "adapter_config.json").exists()
        return
    config = LoraConfig(**_read(folder, "adapter_config.json"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=False))
        trained, _ = get_peft_model(model, config).get_nb_trainable_parameters()
    totals = pricing_of(plan.model.spec, plan.cluster, plan.training, load_runtime("hf")).totals
    assert trained == totals.num_trained_parameters
    if adapters.base_bits == 4:
        packed = BitsAndBytesConfig(**_read(folder, "quantization_config.json"))
        assert packed.load_in_4bit
        assert packed.bnb_4bit_use_double_quant
        # bf16 storage is what FSDP2 can split
        assert packed.bnb_4bit_quant_storage is (torch.bfloat16 if plan.parallelism.zero_stage else torch.uint8)


def test_accelerate_launches_by_its_file(job: tuple[Plan, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plan, folder = job
    file = folder / "accelerate_config.yaml"
    if plan.parallelism.num_gpus_used == 1:
        assert not file.exists()
        assert "python " in (folder / "launch.sh").read_text()
        return
    words = ["--config_file", str(file), "--machine_rank", "0", "--main_process_ip", "here", "train.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    environment = prepare_multi_gpu_env(arguments)
    assert (arguments.num_processes, arguments.num_machines) == (
        plan.parallelism.num_gpus_used, plan.parallelism.num_gpus_used // 8,
    )  # fmt: skip
    if plan.parallelism.zero_stage == 0:
        assert arguments.multi_gpu
        assert not arguments.use_fsdp
        return
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (plan.parallelism.zero_stage == 3)
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
    assert str(plugin.state_dict_type).endswith("SHARDED_STATE_DICT")
    if plan.parallelism.shard_size < plan.parallelism.dp:
        assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"


def test_deepspeed_takes_its_file() -> None:
    pytest.importorskip("deepspeed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    offloads = load_runtime("hf").model_copy(update={"optimizer_offload_fraction": 1.0})
    plan = _plan(dp=8, zero_stage=3).model_copy(update={"runtime_spec": offloads})
    config = HfTrainerDeepSpeedConfig(deepspeed_config(plan))
    arguments = trl.SFTConfig(
        "out", use_cpu=True, bf16=True, per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    arguments._n_gpu, arguments.distributed_state.num_processes = 1, 8
    config.trainer_config_process(arguments)
    assert config.mismatches == []
    assert config.is_zero3()
    assert config.is_offload()
    assert config.get_value("optimizer.params.lr") == arguments.learning_rate


@pytest.mark.parametrize("name", dict.fromkeys(name for _, name in _LAYER_CLASSES))
def test_layers_have_their_names_in_transformers(name: str) -> None:
    sources = Path(transformers.__file__).parent / "models"
    stem = name.removesuffix("TextDecoderLayer").removesuffix("DecoderLayer").removesuffix("Layer")
    found = [path for path in sources.glob(f"{stem[:3].lower()}*/modeling_*.py") if f'"{name}"' in path.read_text()]
    assert found, "no model names it in _no_split_modules"


def test_the_exported_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = AdapterSpec(rank=4, targets=("attention",)).model_dump()
    plan = _plan(adapters=adapters, tokens=2 * 4 * 64, recompute="full")
    export(plan, "hf", tmp_path / "run")
    _make_model(tmp_path / "model")
    rows = [{"text": " ".join(f"w{(i * j) % 250}" for j in range(100))} for i in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("model", "data.jsonl", "checkpoints"):
        variable = {"data.jsonl": "DATASET"}.get(name, name.upper())
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["train.py", "--use_cpu", "--dataloader_num_workers", "0"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(tmp_path / "run" / "train.py"), run_name="__main__")
    state = json.loads((tmp_path / "checkpoints" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    # sequences are packed to the length that was priced
    assert state["log_history"][0]["num_tokens"] == plan.training.tokens_per_step
    saved = json.loads((tmp_path / "checkpoints" / "adapter_config.json").read_text())
    assert (saved["r"], sorted(saved["target_modules"])) == (4, ["k_proj", "o_proj", "q_proj", "v_proj"])


def _make_model(folder: Path) -> None:
    """A Llama of two small layers with random weights, and a tokenizer of as many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    words = {f"w{i}": i for i in range(254)} | {"<pad>": 254, "<eos>": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    wrapped.save_pretrained(folder)
