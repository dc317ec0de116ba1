"""Launch scripts, argument lists and YAML of Megatron-LM become the run they are.

Scripts of Megatron-DeepSpeed, as BLOOM's are written, and scripts that train no GPT.
Recipes of NeMo AutoModel and NeMo RL, and commands of OpenRLHF, as the runs that they start.
Recipes in Python, of Megatron-Bridge, NeMo and torchtitan, are followed and never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refused
from samples import BASE, SCRIPT, TEXTS, layout_of
from tables import beside

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.import_run import read, read_configuration
from planner.export.imported_run import ImportedRun
from planner.export.megatron.option_rows import options_of
from planner.layout.runs import parse_run
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.specs.units import GIB

TABLES = beside(__file__)

Planned = Callable[..., Plan]


def test_a_launch_script() -> None:
    imported = read_configuration(SCRIPT)
    run, layout = imported.run, layout_of(imported)
    assert imported.source == "megatron"
    assert run["num_gpus"] == 128
    assert (run["seq_length"], run["global_batch_size"], run["dtype"]) == (4096, 512, "bf16")
    assert run["model"]["vocab_size"] == 128256
    assert run["model"]["num_key_value_heads"] == 8
    assert (layout["tp"], layout["pp"], layout["vpp"]) == (4, 4, 1)
    assert layout["layout"] == "Et*19|(t*20|)*2t*21L"
    assert (layout["recompute"], layout["recompute_num_layers"]) == ("full", 3)
    assert layout["zero_stage"] == 1
    assert imported.unknown == {"--brand-new-switch": "7"}
    assert {"--save", "--lr"} <= imported.ignored.keys()


def test_the_last_of_equal_options_wins() -> None:
    assert options_of(["x", "--a", "1", "--a=2", "--nproc_per_node", "8"]) == {"--a": ["2"], "--nproc-per-node": ["8"]}


def own_read(options: str, gpus: int = 32) -> ImportedRun:
    return read_configuration(
        f"torchrun --nnodes {gpus // 8} --nproc-per-node 8 pretrain_gpt.py {BASE} --bf16 {options}"
    )


@pytest.mark.parametrize(("options", "expected"), TABLES["layouts_of_options"])
def test_parallelism(options: str, expected: dict[str, Any]) -> None:
    layout = layout_of(own_read(options))
    assert {key: layout.get(key) for key in expected} == expected


@pytest.mark.parametrize(("options", "expected"), TABLES["models_of_options"])
def test_models(options: str, expected: dict[str, Any]) -> None:
    model = own_read(options).run["model"]
    assert {key: model.get(key) for key in expected} == expected


@pytest.mark.parametrize(("options", "drops"), TABLES["megatron_drops_a_tenth_unless_told_otherwise"])
def test_megatron_drops_a_tenth_unless_told_otherwise(options: str, drops: bool) -> None:
    assert own_read(options).run["features"]["dropout"] is drops


@pytest.mark.parametrize(("backend", "means"), [("deepep", "deepep"), ("ncclep", "hybridep")])
def test_backends_of_the_flexible_dispatcher(backend: str, means: str) -> None:
    imported = own_read(f"--num-experts 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {backend}")
    assert (imported.run["features"]["dispatcher"], imported.unknown) == (means, {})


def test_weight_gradients_that_are_not_added_by_their_product() -> None:
    imported = own_read("--no-gradient-accumulation-fusion")
    assert imported.run["features"]["gradient_accumulation_fusion"] is False
    assert imported.unknown == {}


@pytest.mark.parametrize(("options", "width"), TABLES["experts_are_as_wide_as_a_dense_mlp_unless_told"])
def test_experts_are_as_wide_as_a_dense_mlp_unless_told(options: str, width: int) -> None:
    assert own_read(f"--num-experts 8 {options}").run["model"]["moe"]["moe_intermediate_size"] == width


@pytest.mark.parametrize(
    ("pattern", "dense", "every"),
    [
        *TABLES["layers_with_experts"],
        ("+".join(["([0]*1", *["[1]*1", "[0]*1"] * 15, "[1]*1)"]), 0, 2),
        ("+".join(["([0]*5", *["[1]*1", "[0]*2"] * 8, "[1]*1", "[0]*2)"]), 3, 3),
    ],
)
def test_layers_with_experts(pattern: str, dense: int, every: int) -> None:
    """Dense layers in front, then every n-th has experts: what an export writes for each model spec comes back."""
    options = f"--num-experts 8 --ffn-hidden-size 4096 --moe-ffn-hidden-size 1024 --moe-layer-freq '{pattern}'"
    moe = own_read(options).run["model"]["moe"]
    assert (moe["first_k_dense_replace"], moe["moe_layer_freq"]) == (dense, every)


def test_a_default_that_changed_is_noted() -> None:
    assert any("before it sharded nothing" in note for note in own_read("--use-megatron-fsdp").notes)
    assert own_read("--use-megatron-fsdp --data-parallel-sharding-strategy optim").notes == []


@pytest.mark.parametrize(("options", "recipe", "noted"), TABLES["scales_that_are_not_modelled_are_named"])
def test_scales_that_are_not_modelled_are_named(options: str, recipe: str | None, noted: bool) -> None:
    imported = own_read(options)
    assert imported.run["precision_recipe"] == recipe
    named = [note for note in imported.notes if "--fp8-recipe" in note]
    assert len(named) == noted
    assert all(str(recipe).removeprefix("fp8-") in note for note in named)
    # --fp8-param-gather is off unless it is given: weights of 16 bits stay beside their copies
    for more, wide in (("", False), (" --fp8-param-gather", None)):
        features = own_read(f"{options} --use-distributed-optimizer{more}").run["features"]
        assert features.get("fp8_params") == (wide if "fp8" in options else None)


def test_a_batch_size_left_out_is_one_micro_batch_a_rank() -> None:
    text = BASE.replace(" --global-batch-size 64", "")
    imported = read_configuration(f"torchrun --nproc-per-node 8 pretrain_gpt.py {text} --tensor-model-parallel-size 2")
    assert imported.complete(hardware="h100")["global_batch_size"] == 8
    assert imported.complete(hardware="h100", num_gpus=16)["global_batch_size"] == 16


def test_a_hybrids_pattern_says_layers_stages_and_predictions() -> None:
    nano = load_model("nemotron-3-nano-30b-a3b")
    letters = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    sizes = TABLES["a_hybrids_pattern_says_layers_stages_and_predictions"]
    text = f"python pretrain_hybrid.py {sizes} --hybrid-layer-pattern '{letters}' --pipeline-model-parallel-size 2"
    imported = read_configuration(text)
    model = ModelSpec.model_validate(imported.complete(num_gpus=16, hardware="h100")["model"])
    assert (model.name, model.layer_types, model.mlp_layer_types) == (nano.name, nano.layer_types, nano.mlp_layer_types)
    assert (model.mamba, imported.unknown, imported.refused) == (nano.mamba, {}, [])
    staged = read_configuration(text.replace(letters, f"{letters[:20]}|{letters[20:]}/*E"))
    assert layout_of(staged)["layout"] == f"E{'t' * 20}|{'t' * 32}mL"
    assert staged.run["model"]["num_nextn_predict_layers"] == 1


BLOOM = TEXTS["megatron-deepspeed bloom"]


def test_blooms_script() -> None:
    imported = read_configuration(BLOOM)
    run, layout = imported.run, layout_of(imported)
    assert (imported.source, run["runtime"], run["num_gpus"]) == ("megatron-deepspeed", "megatron-deepspeed", 384)
    assert (layout["tp"], layout["pp"], layout["micro_batch_size"], run["global_batch_size"]) == (4, 12, 2, 2048)
    assert (layout["recompute"], run["dtype"]) == ("full", "bf16")
    assert layout["layers_per_stage"] == [5, *[6] * 10, 5], "embedding and head count as a layer each"
    assert layout["zero_stage"] == 1
    assert "DeepSpeed's optimizer of bf16 shards its states all the same" in " ".join(imported.notes)
    model = run["model"]
    assert (model["position_embedding"], model["embedding_norm"], model["vocab_size"]) == ("alibi", True, 250880)
    assert imported.unknown == {}
    assert parse_run({"run": imported.complete(hardware="a100")}).parallelism.pp == 12


def read_options(options: str) -> ImportedRun:
    return read_configuration(f"deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py {BASE} --deepspeed {options}")


@pytest.mark.parametrize(("options", "expected"), TABLES["its_own_words_for_the_layout"])
def test_its_own_words_for_the_layout(options: str, expected: dict[str, Any]) -> None:
    imported = read_options(options)
    assert imported.run["num_gpus"] == 16
    said = imported.run["features"] | layout_of(imported)
    assert {name: said.get(name) for name in expected} == expected


def test_its_own_words_for_the_model() -> None:
    model = read_options("--glu-activation swiglu --normalization rmsnorm --num-key-value-heads 8").run["model"]
    assert (model["gated_mlp"], model["norm"], model["num_key_value_heads"]) == (True, "rmsnorm", 8)
    moe = read_options("--num-experts 64 --moe-expert-parallel-size 8").run["model"]["moe"]
    assert (moe["num_experts_per_tok"], moe["moe_layer_freq"]) == (1, 2), "every second layer, one expert a token"
    assert read_options("--num-experts 1").run["model"].get("moe") is None
    with pytest.raises(SpecError, match="residual or growing experts"):
        read_options("--num-experts 64 128 --mlp-type residual")


def test_a_configuration_beside_the_script(tmp_path: Path) -> None:
    offloads = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": offloads}))
    (tmp_path / "run.sh").write_text(
        f"deepspeed pretrain_gpt.py {BASE} --fp16 --deepspeed --deepspeed_config $DIR/ds.json"
    )
    imported = read(tmp_path / "run.sh")
    assert (layout_of(imported)["zero_stage"], imported.unknown) == (3, {})
    assert (imported.run["features"]["optimizer_offload"], imported.run["features"]["parameter_offload"]) == (1.0, True)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        *TABLES["what_is_no_gpt_is_named"],
        (f"torchrun pretrain_bert.py {BASE}", "this is BERT"),
        (f"torchrun pretrain_t5.py {BASE}", "this is T5"),
        (f"torchrun pretrain_gpt.py {BASE} --retro-add-retriever", "this is Retro"),
        (f"torchrun pretrain_vlm.py {BASE}", "this is a vision-language model"),
        (f"torchrun pretrain_gpt.py {BASE} --is-hybrid-model --hybrid-mlp-ratio 0.5", "this is Mamba"),
    ],
)
def test_what_is_no_gpt_is_named(text: str, what: str) -> None:
    with pytest.raises(SpecError, match=what):
        read_configuration(text)


@pytest.mark.parametrize(("options", "size"), TABLES["vocabularies_of_published_tokenizers"])
def test_vocabularies_of_published_tokenizers(options: str, size: int | None) -> None:
    base = BASE.replace("--vocab-size 50304 ", "")
    imported = read_configuration(f"torchrun --nproc-per-node 8 pretrain_gpt.py {base} --bf16 {options}")
    assert imported.run["model"]["vocab_size"] == size
    if size is None:
        with refused("vocab_size is not in the configuration", "add --vocab-size N"):
            imported.complete()


@pytest.mark.parametrize(("options", "unknown"), TABLES["options_that_are_not_priced_are_listed"])
def test_options_that_are_not_priced_are_listed(options: str, unknown: dict[str, str]) -> None:
    assert read_configuration(f"torchrun --nproc-per-node 8 pretrain_gpt.py {BASE} --bf16 {options}").unknown == unknown


SAMPLES = yaml.safe_load(Path(__file__).with_name("law_samples.yaml").read_text())
_ROUNDED = (
    "  cp_size: 2>  cp_size: 1\n  pp_size: 4\n"
    "  pipeline: {pp_schedule: interleaved1f1b, layers_per_stage: 5, round_virtual_stages_to_pp_multiple: "
)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ten stages of 48 layers, as twelve": ("automodel", f"{_ROUNDED}up}}", {"vpp": 3, "layers_per_stage": [4] * 12}),
    "ten stages, as eight": ("automodel", f"{_ROUNDED}down}}", {"vpp": 2, "layers_per_stage": [6] * 8}),
    "pipeline of a mixture": ("automodel", "  cp_size: 2>  cp_size: 1\n  pp_size: 4", {"pp": 4, "zero_stage": 1}),
    "sharded layer by layer": ("automodel", "", {"ep": 8, "cp": 2, "zero_stage": 3, "recompute": "full"}),
    "under Megatron core": ("nemo-rl", "", {"tp": 4, "pp": 2, "recompute": "full", "micro_batch_size": 2}),
    "no recomputation": ("nemo-rl", "activation_checkpointing: true>activation_checkpointing: false", {"tp": 4}),
    "under AutoModel": ("nemo-rl-dtensor", "", {"tp": 2, "zero_stage": 3, "micro_batch_size": 2}),
    "DeepSpeed": ("openrlhf", "", {"zero_stage": 3, "micro_batch_size": 2, "recompute": "full"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_read(name: str) -> None:
    sample, edit, layout = CASES[name]
    old, _, new = edit.partition(">")
    found = read_configuration(SAMPLES[sample]["text"].replace(old, new) if edit else SAMPLES[sample]["text"])
    assert found.run["parallelism"].items() >= layout.items()
    assert ("recompute" in found.run["parallelism"]) is (name != "no recomputation")


def test_policies_of_nemo_rl_keep_fp32_weights_logits_and_what_each_wrapped_part_reads() -> None:
    """12.2B of Mistral NeMo on 8 H100 held 42.71 GB at the peak, on pairs of 5,500 tokens (NeMo RL 926)."""
    text = TABLES["policies_of_nemo_rl_keep_fp32_weights_logits_and_what_each_wrapped_part_reads"]
    for edit, peak_gib in (("", 42.7), ("_v2: true, ", 30.0)):
        imported = read_configuration(text.replace("dtensor_cfg: {", "dtensor_cfg: {" + edit))
        stage = parse_run({"run": imported.complete(hardware="h100")}).evaluate().worst_stage
        assert stage.memory.peak_allocated_bytes / GIB == pytest.approx(peak_gib, rel=0.03)


def test_weights_stay_gathered_where_a_step_has_several_microbatches() -> None:
    text = SAMPLES["automodel"]["text"].replace("torch_dtype: bfloat16", "backend: {enable_fsdp_optimizations: true}")
    stages = {}
    for gpus in (16, 64):
        stages[gpus] = read_configuration(text).complete(hardware="h100", num_gpus=gpus)["parallelism"]["zero_stage"]
    assert stages == {16: 1, 64: 3}


@pytest.mark.parametrize(("moments", "features"), TABLES["states_and_loss_of_automodel_are_priced"])
def test_states_and_loss_of_automodel_are_priced(moments: str, features: dict[str, bool]) -> None:
    optimizer = (
        f"{{_target_: te.FusedAdam, master_weights: true, exp_avg_dtype: {moments}, exp_avg_sq_dtype: {moments}}}"
    )
    loss = "{_target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy, fp32_upcast: false}"
    text = SAMPLES["automodel"]["text"].replace("strategy: fsdp2", "defer_fsdp_grad_sync: false")
    found = read_configuration(f"{text}\noptimizer: {optimizer}\nloss_fn: {loss}\n")
    said = {**features, "chunked_loss": True, "loss_upcast": False, "gradient_sync": "each"}
    assert found.run["features"].items() >= said.items()
    assert not found.unknown


def test_overrides_stand_over_the_files_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(SAMPLES["nemo-rl"]["text"])
    (tmp_path / "sft.yaml").write_text("defaults: base.yaml\npolicy:\n  train_micro_batch_size: 1\n")
    script = tmp_path / "run.sh"
    script.write_text("uv run run_sft.py --config=sft.yaml ++policy.megatron_cfg.tensor_model_parallel_size=8\n")
    run = read(script).run
    assert (run["parallelism"]["tp"], run["parallelism"]["pp"], run["parallelism"]["micro_batch_size"]) == (8, 2, 1)
    assert (run["num_gpus"], run["global_batch_size"], run["seq_length"]) == (32, 128, 4096)


def test_what_has_no_default_is_asked_for() -> None:
    text = SAMPLES["automodel"]["text"].replace("  local_batch_size: 2\n", "")
    with pytest.raises(SpecError, match="local_batch_size is not in the file"):
        read_configuration(text)


def test_a_trainer_without_a_reader_is_named() -> None:
    for name, text in (
        ("MaxText", "python3 -m MaxText.train MaxText/configs/base.yml per_device_batch_size=4"),
        ("XTuner", "from mmengine.dataset import DefaultSampler\nmax_length = 200\nbatch_size = 1"),
        ("LitGPT", "checkpoint_dir: a/b\nlora_r: 8\ntrain:\n  global_batch_size: 16\n  micro_batch_size: 1\n"),
        ("VeOmni", "model:\n  model_path: a/b\ntrain:\n  global_batch_size: 16\n  micro_batch_size: 1\n"),
        ("EasyR1", "python -m verl.trainer.main config=a.yaml worker.actor.global_batch_size=8 trainer.nnodes=1"),
        ("SkyRL", "trainer.policy.model.path: a/b\ntrainer.strategy: fsdp2\n"),
    ):
        with pytest.raises(SpecError, match=f"{name}, which is not read"):
            read_configuration(text)


COMMON = TEXTS["bridge common"]
BRIDGE = TEXTS["bridge recipes"]


def test_a_recipe_of_bridge(tmp_path: Path) -> None:
    (tmp_path / "common.py").write_text(COMMON)
    (tmp_path / "llama3.py").write_text(BRIDGE + "\n# megatron.bridge\n")
    with pytest.raises(SpecError, match="the file holds 2 recipes") as caught:
        read(tmp_path / "llama3.py")
    assert "llama3_70b_pretrain_64gpu_h100_fp8_config, llama3_70b_sft_config" in str(caught.value.hint)
    imported = read(tmp_path / "llama3.py", recipe="llama3_70b_pretrain_64gpu_h100_fp8_config")
    run, layout = imported.run, layout_of(imported)
    assert (imported.source, run["runtime"], run["model"], run["num_gpus"]) == ("bridge", "bridge", "llama-3.1-70b", 64)
    assert (layout["tp"], layout["pp"], layout["vpp"], layout["sequence_parallel"]) == (4, 4, 5, True)
    assert (layout["recompute"], layout["recompute_modules"], layout["zero_stage"]) == ("selective", ["mlp"], 1)
    assert (run["seq_length"], run["global_batch_size"], run["dtype"]) == (8192, 256, "fp8")
    assert (run["precision_recipe"], run["hardware"]) == ("fp8-tensorwise", "h100")
    assert (imported.unknown, run["features"]["cpu_offloading_num_layers"]) == ({}, 20)
    other = read(tmp_path / "llama3.py", recipe="llama3_70b_sft_config")
    assert (layout_of(other)["tp"], other.run["dtype"]) == (1, "bf16"), "nothing of the other recipe"
    with pytest.raises(SpecError, match="has no function 'llama3_7b_sft_config'"):
        read(tmp_path / "llama3.py", recipe="llama3_7b_sft_config")


TITAN = TEXTS["torchtitan registry"]


def test_a_registry_of_torchtitan() -> None:
    with pytest.raises(SpecError, match="holds 2 recipes"):
        read_configuration(TITAN)
    imported = read_configuration(TITAN, recipe="llama3_405b")
    run, layout = imported.run, layout_of(imported)
    assert (run["model"], run["dtype"], run["precision_recipe"]) == ("llama-3.1-405b", "fp8", "fp8-rowwise")
    assert (layout["recompute"], layout["tp"], layout["pp"], layout["micro_batch_size"]) == ("full", 8, 4, 2)
    assert layout["layers_per_stage"] == [31, 32, 32, 31], "embedding and head count as a layer each"
    assert layout_of(read_configuration(TITAN, recipe="base"))["pp"] == 1


def test_an_older_toml() -> None:
    imported = read_configuration(TABLES["an_older_toml"])
    layout = layout_of(imported)
    assert (layout["tp"], layout["pp"], layout["dp"], imported.run["num_gpus"]) == (2, 2, 4, 16)
    assert (imported.run["dtype"], layout["recompute"], layout["recompute_layers"][:2]) == ("fp8", "full", [1, 3])


NEMO = TEXTS["nemo recipe"]


def test_a_recipe_of_nemo() -> None:
    imported = read_configuration(NEMO)
    run, layout = imported.run, layout_of(imported)
    assert (imported.source, run["model"], run["num_gpus"]) == ("nemo", "llama-3.1-70b", 32)
    assert (layout["tp"], layout["cp"], layout["zero_stage"]) == (4, 2, 1)
    assert (run["seq_length"], run["global_batch_size"], run["dtype"]) == (8192, 512, "bf16")
    assert run["features"]["tp_comm_overlap"] is True
    assert read_configuration(NEMO, recipe="finetune_recipe").run["num_gpus"] == 8


def test_nemos_first_version() -> None:
    text = TEXTS["nemo first version"]
    imported = read_configuration(text)
    run, layout, model = imported.run, layout_of(imported), imported.run["model"]
    assert (run["num_gpus"], run["seq_length"], run["global_batch_size"], run["dtype"]) == (16, 4096, 128, "bf16")
    assert (layout["tp"], layout["micro_batch_size"], layout["recompute"], layout["zero_stage"]) == (4, 2, "full", 1)
    assert (
        model["intermediate_size"], model["gated_mlp"], model["norm"], model["bias"],
    ) == (20480, True, "rmsnorm", False)  # fmt: skip
    with pytest.raises(SpecError, match="this is t5"):
        read_configuration(text.replace("megatron_gpt", "megatron_t5"))


@pytest.mark.parametrize("text", TABLES["recipes_that_lead_nowhere"])
def test_recipes_that_lead_nowhere(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(text)
    with pytest.raises(SpecError):
        read(tmp_path / "recipe.py")
