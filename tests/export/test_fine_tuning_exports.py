"""Adapters go to Hugging Face's trainers; every other target, and the probe, refuse them by name with a way out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from samples import TEXTS
from tables import beside

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.export import bundle_of, export
from planner.export.huggingface.trl_files import attention_name
from planner.export.import_run import read, read_configuration
from planner.export.refusal import Inexpressible
from planner.export.targets import TRAINERS
from planner.layout.evaluate import evaluate
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.rules.recipe import export_rules_for
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched

TABLES = beside(__file__)

ABLE = ("hf",)
"""Targets that write adapters."""


def _plan(
    runtime: RuntimeSpec | str = "hf",
    gpus: int = 1,
    adapters: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    **layout: Any,
) -> Plan:
    layout = {"dp": gpus, "micro_batch_size": 2, "zero_stage": 0, **layout}
    training = {"seq_length": 1024, "global_batch_size": 4 * gpus, "adapters": adapters}
    training |= {"objective": objective} if objective else {}
    return evaluate(
        load_model("llama-3.2-1b"), ClusterSpec(hardware=load_hardware("h100"), num_gpus=gpus),
        TrainingSpec.model_validate(training), Parallelism.model_validate(layout), runtime=runtime,
    )  # fmt: skip


@pytest.mark.parametrize("target", [name for name in TRAINERS if name not in ABLE])
@pytest.mark.parametrize("bits", [16, 4])
def test_other_targets_refuse_adapters(target: str, bits: int) -> None:
    hardware = "mi300x" if target == "primus" else "h100"
    runtime = TRAINERS[target].runtimes[0]
    sharded = 3 in load_runtime(runtime).zero_stages and target == "torchtitan"
    plan = _plan(runtime, 8, {"rank": 8, "base_bits": bits}, zero_stage=3 if sharded else 0)
    plan = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"hardware": load_hardware(hardware)})})
    with pytest.raises(Inexpressible, match="adapters: LoRA of rank 8") as caught:
        bundle_of(plan, [target], force=True)
    assert ("weights of 4 bits" in caught.value.message) == (bits == 4)
    assert caught.value.hint == "--to hf writes them"
    assert [
        warning for warning in plan.warnings if "plan export refuses this model" in warning and "adapters" in warning
    ]


@pytest.mark.parametrize(("name", "attention"), TABLES["attention_is_one_that_takes_the_models_caps_and_sinks"])
def test_attention_is_one_that_takes_the_models_caps_and_sinks(name: str, attention: str) -> None:
    assert attention_name(load_runtime("hf"), load_model(name)) == attention
    blackwell = attention if "flash-attn3" not in attention else "flash_attention_4"
    assert attention_name(load_runtime("hf"), load_model(name), "blackwell") == blackwell


@pytest.mark.parametrize(("recipe", "zero_stage", "needs"), TABLES["packages_that_a_recipe_needs"])
def test_what_a_recipe_takes_from_other_packages_is_looked_for(
    recipe: dict[str, Any], zero_stage: int, needs: list[str]
) -> None:
    plan = _plan(switched(load_runtime("hf"), recipe), 2, zero_stage=zero_stage)
    [checks] = [file.text for file in bundle_of(plan, "hf").files if file.name == "preflight.py"]
    found = re.findall(r'\\"module\\": \\"([\w.:]+)', checks)
    assert sorted({*found} - {"torch", "transformers", "trl", "accelerate", "datasets"}) == needs


@pytest.mark.parametrize("name", ["gemma-4-31b", "qwen3-next-80b-a3b", "nemotron-3-nano"])
def test_transformers_builds_what_no_description_says(name: str) -> None:
    """Layers, heads and norms that other exports cannot write are those of the model's own config.json."""
    rules, model = export_rules_for(load_runtime("hf")), load_model(name).model_copy(update={"vision": None})
    training = TrainingSpec(seq_length=2048, global_batch_size=16)
    reasons = [rule.reason for rule in rules if not rule.holds(model, training, Shape())]
    assert reasons == (["mtp"] if model.num_nextn_predict_layers else [])


def test_the_hint_of_a_refusal_works() -> None:
    plan = _plan("megatron", 8, {"rank": 8}, zero_stage=0)
    assert "adapter_config.json" in {file.name for file in bundle_of(plan, ["hf"], force=True).files}
    split = _plan("megatron", 8, {"rank": 8}, tp=2, dp=4)
    for target in ("megatron", "hf"):
        with pytest.raises(Inexpressible) as caught:
            bundle_of(split, [target], force=True)
        assert "plan again with --runtime hf" in str(caught.value.hint)


@pytest.mark.parametrize("target", [name for name in TRAINERS if name not in ("hf", "primus")])
def test_other_targets_refuse_other_objectives(target: str) -> None:
    runtime = TRAINERS[target].runtimes[0]
    for name in ("dpo", "kto"):
        stage = 3 if target == "torchtitan" else 0
        plan = _plan(runtime, 8, objective={"name": name}, zero_stage=stage)
        with pytest.raises(Inexpressible, match=f"objective: {name}"):
            bundle_of(plan, [target], force=True)


def test_pairs_of_answers_go_to_dpo_trainer() -> None:
    plan = _plan(adapters={"rank": 4}, objective={"name": "dpo", "reference": "adapters"})
    files = {file.name: file.text for file in bundle_of(plan, ["hf"], force=True).files}
    settings = yaml.safe_load(files["training_arguments.yaml"])
    # two sequences are a pair, which the trainer counts
    assert (settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]) == (1, 2)
    assert "packing" not in settings
    assert "trainer = DPOTrainer(" in files["train.py"]
    for objective, reason in (({"name": "kto", "reference": "adapters"}, "objective"), ({"name": "dpo"}, "reference")):
        with pytest.raises(Inexpressible, match=reason):
            bundle_of(_plan(adapters={"rank": 4}, objective=objective), ["hf"], force=True)


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_batches_are_packed_where_the_plan_packs(batching: str) -> None:
    plan = _plan()
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"batching": batching})})
    files = {file.name: file.text for file in bundle_of(plan, ["hf"], force=True).files}
    is_packed = yaml.safe_load(files["training_arguments.yaml"]).get("packing", False)
    assert is_packed == ("are packed to" in files["training_arguments.yaml"]) == (batching == "packed")


def test_the_probe_refuses_adapters() -> None:
    pytest.importorskip("torch")
    from planner.errors import ProbeError
    from planner.probe.probe import ProbeOptions, probe

    plan = _plan(adapters={"rank": 4})
    with pytest.raises(ProbeError, match="LoRA of rank 4 cannot be probed") as caught:
        probe(plan, ProbeOptions(device="cpu", stages="all"))
    assert "--to hf" in str(caught.value.hint)


@pytest.mark.parametrize(("layout", "reason"), TABLES["hf_refuses_what_its_files_cannot_say"])
def test_hf_refuses_what_its_files_cannot_say(layout: dict[str, Any], reason: str) -> None:
    with pytest.raises(Inexpressible) as caught:
        bundle_of(_plan(**layout), ["hf"], force=True)
    assert reason in {found.name for found in caught.value.reasons}


def test_names_of_modules_need_gated_mlps() -> None:
    plan = _plan(adapters={"targets": ["attention"]})
    spec = plan.model.spec.model_copy(update={"gated_mlp": False})
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"spec": spec})})
    with pytest.raises(Inexpressible, match="--lora-targets all-linear finds them"):
        bundle_of(plan, ["hf"], force=True)


def test_a_folder_is_read_whole(tmp_path: Path) -> None:
    plan = _plan(gpus=8, adapters={"rank": 4, "base_bits": 4}, zero_stage=3)
    export(plan, "hf", tmp_path / "run")
    imported = read(tmp_path / "run")
    assert (imported.run["model"], imported.run["num_gpus"], imported.run["runtime"]) == ("llama-3.2-1b", 8, "hf")
    assert imported.run["adapters"]["base_bits"] == 4
    assert not imported.unknown
    (tmp_path / "run" / "training_arguments.yaml").unlink()
    # Accelerate's file is left, with adapters beside it
    rest = read(tmp_path / "run")
    assert (rest.source, rest.run["runtime"], rest.run["adapters"]["rank"]) == ("accelerate", "hf", 4)
    (tmp_path / "none").mkdir()
    with pytest.raises(SpecError, match="none of its files"):
        read(tmp_path / "none")


def test_one_gpu_needs_no_launcher_of_ranks_and_several_nodes_one_address() -> None:
    files = {file.name: file.text for file in bundle_of(_plan(), ["hf"], force=True).files}
    assert "accelerate_config.yaml" not in files
    assert 'python "$PLAN_DIR"/train.py' in files["launch.sh"]
    many = {file.name: file.text for file in bundle_of(_plan(gpus=16), ["hf"], force=True).files}
    for name in ("launch.sh", "launch.sbatch"):
        assert '--main_process_ip "$MASTER_ADDR"' in many[name]
    config = yaml.safe_load(many["accelerate_config.yaml"])
    assert (config["num_machines"], config["num_processes"]) == (2, 16)


ALIGNMENT_HANDBOOK = TEXTS["alignment handbook"]
AXOLOTL = TEXTS["axolotl"]
LLAMA_FACTORY = TEXTS["llama factory"]


@pytest.mark.parametrize(
    ("text", "model", "rank", "targets"),
    [(ALIGNMENT_HANDBOOK, "qwen3-8b", 32, 7), (AXOLOTL, "llama-3.1-8b", 64, 1), (LLAMA_FACTORY, "llama-3.1-8b", 8, 1)],
)
def test_recipes_of_others_are_priced_with_their_adapters(text: str, model: str, rank: int, targets: int) -> None:
    imported = read_configuration(text)
    run, adapters = imported.run, imported.run["adapters"]
    assert (run["model"], run["runtime"], adapters["rank"], adapters["base_bits"]) == (model, "hf", rank, 4)
    assert len(adapters["targets"]) == targets
    assert not imported.unknown
    complete = imported.complete(num_gpus=8, hardware="h100")
    assert complete["global_batch_size"] == 64
    assert all("not packed" not in note for note in imported.notes)


def test_adapters_alone_and_what_is_no_lora() -> None:
    alone = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "Qwen/Qwen3-8B", "target_modules": "all-linear"}
    imported = read_configuration(json.dumps(alone))
    assert (imported.run["model"], imported.run["adapters"]["rank"]) == ("qwen3-8b", 8)
    other = read_configuration(json.dumps(alone | {"use_dora": True, "modules_to_save": ["embed_tokens"]}))
    assert set(other.unknown) == {"use_dora", "modules_to_save"}
    prefix = read_configuration(json.dumps(alone | {"peft_type": "PREFIX_TUNING"}))
    assert "adapters" not in prefix.run
    assert prefix.unknown == {"peft_type": "PREFIX_TUNING"}
    with pytest.raises(SpecError, match="r: 'many' is no number"):
        read_configuration(json.dumps(alone | {"r": "many"}))


def test_packed_weights_that_are_trained_whole_are_not_understood() -> None:
    imported = read_configuration("model_name_or_path: Qwen/Qwen3-8B\nload_in_4bit: true\nmax_length: 512\nbf16: true\n"
                                  "per_device_train_batch_size: 1\n")  # fmt: skip
    assert "quantization" in imported.unknown
    assert "priced as if each sequence were 512 tokens long" in " ".join(imported.notes)


TORCHTUNE = TEXTS["torchtune"]


def test_recipes_of_torchtune_are_read() -> None:
    imported = read_configuration(TORCHTUNE)
    run = imported.run
    assert (imported.source, run["model"], run["num_gpus"]) == ("torchtune", "llama-3.1-8b", 2)
    assert run["parallelism"] == {"micro_batch_size": 2, "zero_stage": 3, "recompute": "full"}
    assert run["adapters"]["targets"] == ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert run["features"] == {"compile": True, "cpu_offloading_num_layers": 32}
    assert not imported.unknown
    assert imported.complete(hardware="h100")["global_batch_size"] == 32
    odd = TORCHTUNE.replace("lora_llama3_1_8b", "qlora_llama3_1_8b").replace("LinearCrossEntropyLoss", "DPOLoss")
    other = read_configuration(odd.replace("torch.optim.AdamW", "torchao.optim.AdamW4bit"))
    assert other.run["adapters"]["base_bits"] == 4
    assert set(other.unknown) == {"loss._component_", "optimizer._component_"}
    with pytest.raises(SpecError, match="lora_attn_modules: names no module"):
        read_configuration(
            odd.replace("['q_proj', 'v_proj', 'output_proj']", "[]").replace("to_mlp: True", "to_mlp: no")
        )
    with pytest.raises(SpecError, match="batch_size: 'two' is no positive number"):
        read_configuration(TORCHTUNE.replace("batch_size: 2", "batch_size: two"))
