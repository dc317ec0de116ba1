"""Experiments of Primus become runs, as its own parser reads them, with presets around them or without.

Primus' experiments hold keys that its backends know, over presets that say nothing else about the model.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refused
from samples import TEXTS, layout_of
from tables import beside

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.export import bundle_of
from planner.export.import_run import read, read_configuration
from planner.export.imported_run import ImportedRun
from planner.export.megatron.megatron_files import megatron_arguments, training_arguments
from planner.export.megatron.option_rows import key_of
from planner.export.primus_files import export_primus, keys_of, with_core
from planner.export.refusal import Inexpressible
from planner.export.trainer_files import settings
from planner.layout.runs import Run, parse_run

TABLES = beside(__file__)

EXPERIMENT = TEXTS["primus experiment"]


def experiment(model: str, overrides: str, framework: str = "megatron", config: str = "pre_trainer.yaml") -> str:
    lines = "\n".join(f"      {line}" for line in overrides.strip().splitlines())
    return EXPERIMENT.format(framework=framework, config=config, model=model, overrides=lines or "      {}")


def imported(model: str, overrides: str = "", **others: str) -> ImportedRun:
    return read_configuration(experiment(model, overrides, **others))


def run_of(imported: ImportedRun, **given: Any) -> Run:
    return parse_run({"run": imported.complete(**given)})


# Facts of experiments that Primus ships (examples/, commit fd1eeab, MIT licence).
QWEN3_30B = TEXTS["primus qwen3 30b"]
DEEPSEEK_V3 = TEXTS["primus deepseek v3"]
DESCRIBED = TEXTS["primus described"]
LLAMA_70B = TEXTS["primus llama 70b"]

BOMB = "".join(f"{new}: &{new} [*{',*'.join(old * 9)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True))


def test_a_mixture_with_turbo() -> None:
    run = imported("${PRIMUS_MODEL:qwen3_30B_A3B}.yaml", QWEN3_30B)
    layout, features = layout_of(run), run.run["features"]
    assert (run.source, run.run["runtime"], run.run["num_gpus"], run.run["seq_length"]) == (
        "primus", "primus-megatron", 8, 4096,
    )  # fmt: skip
    assert (layout["tp"], layout["ep"], layout["micro_batch_size"], layout["zero_stage"]) == (1, 8, 6, 1)
    assert (layout["recompute"], layout["recompute_num_layers"], layout["sequence_parallel"]) == ("full", 5, False)
    expected = {
        "dispatcher": "deepep", "sync_free_moe": 1, "grouped_gemm": "legacy", "cross_entropy_fusion": True,
        "bf16_gradients": True, "bf16_moments": True, "overlap_param_gather": True,
    }  # fmt: skip
    assert features == features | expected
    assert (run.run["dtype"], run.run["precision_recipe"]) == ("fp8", "fp8-delayed")
    assert run.unknown == {}
    assert run.run["model"] == "qwen3-30b-a3b"
    assert any("pre_trainer.yaml and qwen3_30B_A3B.yaml" in note for note in run.notes)


def test_layers_are_recomputed_by_number_and_a_block_without_a_place_is_left_out() -> None:
    run = imported("own.yaml", DESCRIBED + DEEPSEEK_V3)
    layout = layout_of(run)
    assert (layout["pp"], layout["vpp"], layout["recompute_layers"]) == (16, 2, [0, 3, 4])
    assert run.run["model"]["num_nextn_predict_layers"] == 0
    assert (run.run["model"]["mla"]["q_lora_rank"], run.run["model"]["moe"]["num_experts"]) == (1536, 8)
    assert "num_gpus" not in {name for name, value in run.run.items() if value is not None}
    with pytest.raises(SpecError) as caught:
        run.complete()
    assert caught.value.hint == "add --gpus N, a multiple of 128"
    stages = run_of(run, num_gpus=256).evaluate().stages
    assert sum(sum(n for mode, n in stage.recompute.items() if mode != "none") for stage in stages) == 3


def test_fsdp2_of_a_dense_model() -> None:
    run = imported("llama3.1_70B.yaml", LLAMA_70B)
    layout = layout_of(run)
    assert (layout["zero_stage"], layout["recompute_num_layers"], layout["sequence_parallel"]) == (3, 80, False)
    assert run.run["features"]["gradient_accumulation_fusion"] is False
    assert run_of(run).model.name == "llama-3.1-70b"
    kept = imported("llama3.1_70B.yaml", LLAMA_70B + "torch_fsdp2_reshard_after_forward: false\n")
    assert layout_of(kept)["zero_stage"] == 2


@pytest.mark.parametrize(("overrides", "schedule", "vpp"), TABLES["schedules"])
def test_schedules(overrides: str, schedule: str | None, vpp: int) -> None:
    layout = layout_of(imported("llama3.1_8B.yaml", f"pipeline_model_parallel_size: 4\n{overrides}"))
    assert (layout.get("schedule"), layout["vpp"]) == (schedule, vpp)


def test_presets_with_keys_of_their_own_are_published_models() -> None:
    run = imported("${PRIMUS_MODEL:deepseek_v4_flash}.yaml", "swiglu_limit: 10.0\nexpert_model_parallel_size: 8")
    assert (run.run["model"], run.run["parallelism"]["ep"], run.unknown) == ("deepseek-v4-flash", 8, {})
    assert imported("kimi_k3.yaml").run["model"] == "kimi-k3"


def test_models_beyond_megatrons_arguments() -> None:
    net = imported("own", DESCRIBED + "experimental_attention_variant: gated_delta_net\nlinear_attention_freq: 4\n"
                   "linear_num_value_heads: 32").run["model"]  # fmt: skip
    assert (net["layer_types"], net["linear_attention"]["num_value_heads"]) == (("gated_delta",) * 3 + ("full",), 32)
    sinks = imported("own", DESCRIBED + "use_sink_attention: true\nsink_sliding_window: 128").run["model"]
    assert (sinks["attention_sinks"], sinks["sliding_window"], sinks["sliding_window_pattern"]) == (True, 128, 2)
    assert sinks["name"] == "own"
    lfm = imported("own", DESCRIBED + "lfm_layer_types: [conv, conv, full_attention]").run["model"]
    assert (lfm["layer_types"], lfm["short_conv_kernel"]) == (["conv", "conv", "full"], 3)


@pytest.mark.parametrize("model", ["nosuch.yaml", "../../../../../etc/passwd"])
def test_a_preset_of_no_published_model_leaves_the_model_to_the_user(model: str) -> None:
    run = imported(model, "global_batch_size: 16\nseq_length: 2048")
    assert run.run["model"] is None
    assert run.model_name
    assert run_of(run, model="8b").model.name == "llama-3.1-8b"


def test_torchtitan() -> None:
    overrides = (
        "training:\n  local_batch_size: 6\n  global_batch_size: 96\n  seq_len: 8192\n  mock_data: true\n"
        "model:\n  converters: [primus_turbo, quantize.linear.float8]\nactivation_checkpoint:\n  mode: full\n"
        "parallelism:\n  tensor_parallel_degree: 2\n"
    )
    run = imported("llama3.1_70B-fp8.yaml", overrides, framework="torchtitan")
    layout = layout_of(run)
    assert (run.source, run.run["runtime"], run.run["model"]) == ("primus", "primus-torchtitan", "llama-3.1-70b")
    assert (layout["tp"], layout["micro_batch_size"], layout["recompute"], layout["zero_stage"]) == (2, 6, "full", 3)
    assert (run.run["dtype"], run.run["global_batch_size"], run.run["num_gpus"]) == ("fp8", 96, 8)
    assert run.unknown == {}


def test_bridge() -> None:
    text = (
        "flavor: qwen3_32b_pretrain_config\nglobal_batch_size: 128\nmicro_batch_size: 16\nseq_length: 2048\n"
        "tensor_model_parallel_size: 2"
    )
    run = imported("qwen3_32b.yaml", text, framework="megatron_bridge", config="pretrain_trainer.yaml")
    assert (run.run["model"], layout_of(run)["tp"], run.run["runtime"]) == ("qwen3-32b", 2, "primus-megatron")


def test_presets_of_the_checkout_around_the_file(tmp_path: Path) -> None:
    configs, example = tmp_path / "primus" / "configs", tmp_path / "examples" / "configs" / "MI355X" / "own.yaml"
    for path, text in {
        configs / "modules/megatron/pre_trainer.yaml": "seq_length: 2048\nmicro_batch_size: 2\nhidden_dropout: 0.0\n",
        configs / "models/megatron/base.yaml": "swiglu: true\nnum_layers: 4\nvocab_size: 1000\nseq_length: 7\n",
        configs / "models/megatron/own.yaml": "extends: base.yaml\nhidden_size: 256\n"
        "num_attention_heads: 4\nnum_layers: 6\n",
        example: experiment("own", "global_batch_size: 16\nstrange_key: 3"),
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run = read(example)
    model = run.run["model"]
    assert (
        model["num_hidden_layers"], model["hidden_size"], model["vocab_size"], model["name"],
    ) == (6, 256, 1000, "own")  # fmt: skip
    assert (run.run["seq_length"], run.run["hardware"]) == (2048, "mi355x")  # a module's value goes before a model's
    assert run.unknown == {"strange_key": "3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (experiment("llama3.1_8B.yaml", "tensor_model_parallel_size: 0"), "-parallel-size: 0 is less than 1"),
        (experiment("llama3.1_8B.yaml", "tensor_model_parallel_size: [1]"), "is no number"),
        (experiment("llama3.1_8B.yaml", "tensor_model_parallel_size: ${TP}"), "is no number"),
        (experiment("llama3.1_8B.yaml", "micro_batch_size: 1.5"), "is no whole number"),
        (experiment("", ""), "no preset's name"),
        (experiment("llama3.1_8B.yaml", "", framework="maxtext"), "MaxText's, in JAX"),
        (experiment("zebra_llama_1B.yaml", ""), "Mamba, a state-space model"),
        (experiment("deepseek_v4_base.yaml", ""), "DeepSeek-V4"),
        (experiment("llama3_8B.yaml", "lora:\n  enabled: true\n  dim: x"), "peft.dim"),
        (experiment("llama3_8B.yaml", "turbo_sync_free_moe_stage: 9"), "is no stage"),
        (experiment("llama3_8B.yaml", "recompute_granularity: full\nrecompute_layer_ids: a"), "is no list of layers"),
        (experiment("llama3_8B.yaml", "") + "a: &a [1,1,1,1,1,1,1,1,1]\n" + BOMB, "50,000 values"),
        ("b: &b {x: 1}\nc: {<<: [*b, *b]}\n" + experiment("llama3_8B.yaml", ""), "merges"),
        (experiment("llama3_8B.yaml", "") + "z: " + "[" * 101 + "]" * 101, "nested"),
        (experiment("llama3_8B.yaml", "").replace("overrides:\n      {}", "overrides: 3"), "expected a mapping"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with refused(message):
        read_configuration(text)


def test_a_script_starts_an_experiment_and_overrides_it(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "configs" / "MI355X"
    folder.mkdir(parents=True)
    (folder / "qwen3.yaml").write_text(experiment("qwen3_30B_A3B.yaml", QWEN3_30B))
    (tmp_path / "run.sh").write_text(
        'export NNODES=2\nexport TP=${TP:-4}\nexport EXP="examples/configs/MI355X/qwen3.yaml"\n'
        'bash examples/run_pretrain.sh --micro_batch_size 3 --tensor_model_parallel_size "$TP" --mtp_num_layers None\n'
    )
    found = read(tmp_path / "run.sh")
    layout = layout_of(found)
    assert (found.source, found.run["num_gpus"], found.run["hardware"]) == ("primus", 16, "mi355x")
    assert (layout["tp"], layout["ep"], layout["micro_batch_size"]) == (4, 8, 3)


Planned = Callable[..., Plan]
_RECORDED = json.loads(Path(__file__).with_name("recorded").joinpath("primus_keys.json").read_text(encoding="utf-8"))
"""Keys and their kinds: of Megatron-LM's parser, torchtitan's JobConfig and Primus' presets, of `source`."""
_KINDS = {"bool": bool, "int": int, "float": (int, float), "str": str, "list": (list, int, float, str), "dict": dict}
_JOBS = [
    ("llama-3.1-405b", 2048, {"tp": 8, "pp": 16, "vpp": 4, "layers_per_stage": (1, *[2] * 62, 1)}),
    ("llama-3.1-8b", 16, {"zero_stage": 3, "dtype": "fp8"}),
    ("qwen3-235b-a22b", 256, {"pp": 8, "ep": 8, "recompute": "full", "recompute_num_layers": 2}),
    ("deepseek-v3", 256, {"pp": 16, "ep": 8, "recompute": "selective", "recompute_modules": ("mla_up_proj",)}),
    ("mixtral-8x7b", 64, {"tp": 2, "ep": 8, "cp": 2}),
    ("gpt-oss-20b", 32, {"pp": 4, "ep": 8}),
    ("gpt3-175b", 64, {"tp": 8, "pp": 8}),
]
_UNLIKE_MEGATRON = {
    "async_save", "attention_backend", "cp_comm_type", "cuda_graph_scope", "dist_ckpt_optim_fully_reshardable",
    "dist_ckpt_save_pre_mcore_014", "fp8_amax_compute_algo", "fp8_amax_history_len", "iterations_to_skip",
    "lazy_mpu_init", "local_rank", "log_timers_to_tensorboard", "manual_gc_eval", "muon_momentum", "num_workers",
    "profile_ranks", "replication_factor", "rerun_mode", "suggested_communication_unit_size",
    "use_rotary_position_embeddings",
}  # fmt: skip
"""Keys that presets set otherwise than Megatron-LM's parser, and that leave the run as it is."""


def _amd(planned: Planned, model: str, gpus: int, **layout: Any) -> Plan:
    return planned(model, gpus, runtime=layout.pop("runtime", "primus-megatron"), hardware="mi355x", **layout)


def _overrides(plan: Plan) -> dict[str, Any]:
    overrides: dict[str, Any] = yaml.safe_load(export_primus(plan).files[0].text)["modules"]["pre_trainer"]["overrides"]
    return overrides


@pytest.mark.parametrize(("model", "gpus", "layout"), _JOBS, ids=[job[0] for job in _JOBS])
def test_every_key_is_known_and_of_its_kind(planned: Planned, model: str, gpus: int, layout: dict[str, Any]) -> None:
    known = _RECORDED["megatron"]
    for key, value in _overrides(_amd(planned, model, gpus, **layout)).items():
        assert key in known
        assert value is None or isinstance(value, _KINDS[known[key]]), key
        assert isinstance(value, bool) == (known[key] == "bool") or value is None, key


def test_options_have_the_parser_s_names() -> None:
    recorded = _RECORDED["options"]
    exceptions = {option: entry["key"] for option, entry in recorded.items()}
    for option in (
        "--norm-epsilon",
        "--fp8-format",
        "--disable-bias-linear",
        "--no-rope-fusion",
        "--apply-layernorm-1p",
    ):
        assert key_of(option) == exceptions[option]
        assert keys_of({option: True})[exceptions[option]] is not recorded[option]["off"]


@pytest.mark.parametrize(("model", "gpus", "layout"), _JOBS, ids=[job[0] for job in _JOBS])
def test_no_preset_says_what_the_plan_does_not(planned: Planned, model: str, gpus: int, layout: dict[str, Any]) -> None:
    """What Primus' presets set otherwise than Megatron-LM's parser is written out, or changes nothing."""
    written = _overrides(_amd(planned, model, gpus, **layout))
    assert set(_RECORDED["presets"]) <= {*written, *_UNLIKE_MEGATRON, "eval_interval"}
    assert set(settings("primus-unasked")) <= {*_RECORDED["presets"], "num_query_groups"}


def test_keys_say_what_megatron_s_arguments_say(planned: Planned) -> None:
    plan = _amd(planned, "mixtral-8x7b", 64, tp=2, ep=8, pp=2)
    keys, (pinned, _) = _overrides(plan), with_core(plan)
    arguments = megatron_arguments(pinned)
    arguments.pop("--moe-token-dispatcher-type")  # Primus-Turbo's
    for option, value in arguments.items():
        said = keys[key_of(option)]
        assert said == value or str(said) == str(value) or (value is True and said is False)
    assert keys["padded_vocab_size"] == training_arguments(pinned)["--padded-vocab-size"]


def test_sliding_windows_are_lists_as_the_parser_leaves_them(planned: Planned) -> None:
    keys = _overrides(_amd(planned, "gpt-oss-20b", 32, pp=4, ep=8))
    assert keys["window_size"] == [127, 0]
    assert keys["softmax_type"] == "learnable"
    assert not any(name.startswith("yarn") for name in keys)  # core 0.16 has none of them


@pytest.mark.parametrize(("schedule", "vpp", "algorithm", "held"), TABLES["split_backwards_run_by_primus_tables"])
def test_split_backwards_run_by_primus_tables(
    planned: Planned, schedule: str, vpp: int, algorithm: str, held: int | None
) -> None:
    plan = _amd(planned, "llama-3.1-8b", 16, pp=4, vpp=vpp, schedule=schedule, num_microbatches=16)
    keys = _overrides(plan)
    assert (keys["patch_primus_pipeline"], keys["pp_algorithm"], keys.get("pp_max_mem")) == (True, algorithm, held)
    assert keys.get("num_virtual_stages_per_pipeline_rank", 1) == vpp
    assert (keys["eval_iters"], keys["overlap_grad_reduce"], keys["overlap_param_gather"]) == (0, False, False)


def test_deepep_is_primus_turbo_s(planned: Planned) -> None:
    keys = _overrides(_amd(planned, "qwen3-235b-a22b", 256, pp=8, ep=8, features={"dispatcher": "deepep"}))
    assert keys["enable_primus_turbo"] is keys["use_turbo_deepep"] is True
    assert (keys["moe_token_dispatcher_type"], keys["turbo_deepep_num_cu"]) == ("alltoall", 64)


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize(("model", "layout"), TABLES["torchtitan_s_settings_are_known"])
def test_torchtitan_s_settings_are_known(planned: Planned, model: str, layout: dict[str, Any]) -> None:
    known = _RECORDED["torchtitan"]
    overrides = _overrides(_amd(planned, model, 64, runtime="primus-torchtitan", **layout))
    for name, value in _flat(overrides):
        assert name in known
        kind = known[name]
        assert value in kind if isinstance(kind, list) else value is None or isinstance(value, _KINDS[kind]), name


def test_a_model_without_a_flavor_is_refused_by_name(planned: Planned) -> None:
    plan = _amd(planned, "mixtral-8x7b", 64, runtime="primus-torchtitan", ep=8, zero_stage=3)
    with pytest.raises(Inexpressible, match="no flavor that is mixtral-8x7b"):
        export_primus(plan)


def test_plans_of_other_trainers_are_priced_for_the_backend_of_their_family(planned: Planned) -> None:
    for runtime, framework in (("megatron", "megatron"), ("bridge", "megatron"), ("torchtitan", "torchtitan")):
        zero_stage = 3 if runtime == "torchtitan" else 1
        plan = planned("llama-3.1-8b", 64, runtime=runtime, hardware="mi300x", zero_stage=zero_stage)
        text = bundle_of(plan, ["primus"], force=True).files[0].text
        assert yaml.safe_load(text)["modules"]["pre_trainer"]["framework"] == framework


def test_the_launcher_hands_nodes_to_primus_cli(planned: Planned, tmp_path: Path) -> None:
    bundle = bundle_of(_amd(planned, "llama-3.1-8b", 32, tp=2), ["primus", "torchrun", "kubernetes"], force=True)
    for file in bundle.files:
        (tmp_path / file.name).write_text(file.text)
    (tmp_path / "primus" / "runner").mkdir(parents=True)
    recorder = 'echo "$NNODES $NODE_RANK $GPUS_PER_NODE $MASTER_ADDR $*"\n'
    (tmp_path / "primus" / "runner" / "primus-cli").write_text(recorder)
    run = subprocess.run(
        ["bash", str(tmp_path / "launch.sh"), "--log_interval", "5"],
        env={
            "PATH": "/usr/bin:/bin", "PREFLIGHT": "0", "PRIMUS_PATH": str(tmp_path / "primus"), "NODE_RANK": "3",
            "MASTER_ADDR": "node0", "MOCK": "1",
        },
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    start, _, overrides = run.stdout.strip().partition(" --mock_data")
    assert start == f"4 3 8 node0 direct -- train pretrain --config {tmp_path}/primus.yaml"
    assert overrides == " true --train_iters 20 --eval_iters 0 --save None --load None --log_interval 5"
    manifest = (tmp_path / "kubernetes.yaml").read_text()
    assert "amd.com/gpu: 8" in manifest
    assert 'image: "rocm/primus:v26.5"' in manifest
    assert "nvidia.com" not in manifest


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan"])
def test_nothing_is_written_for_gpus_that_primus_does_not_run_on(planned: Planned, runtime: str) -> None:
    plan = planned("llama-3.1-8b", 16, runtime=runtime, **({"zero_stage": 3} if runtime == "torchtitan" else {}))
    with pytest.raises(Inexpressible, match=f"primus-{runtime} runs on cdna3, .*and h100") as refused:
        bundle_of(plan, to="primus")
    assert refused.value.hint == f"--to {runtime}"
    assert bundle_of(plan, to=runtime).targets[0] == runtime
