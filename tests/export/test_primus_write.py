"""Primus' experiments hold keys that its backends know, over presets that say nothing else about the model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.export.megatron.megatron_files import megatron_arguments, training_arguments
from planner.export.megatron.option_rows import key_of
from planner.export.primus_files import export_primus, keys_of, with_core
from planner.export.refusal import Inexpressible
from planner.export.trainer_files import settings

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


@pytest.mark.parametrize(
    ("schedule", "vpp", "algorithm", "held"),
    [("zb-h1", 1, "zero-bubble", None), ("zb-v", 2, "zbv-formatted", None), ("v-half", 2, "v-half", None)],
)
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


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3.1-70b", {"tp": 8, "pp": 2, "vpp": 2, "zero_stage": 0, "recompute": "full", "num_microbatches": 8}),
        ("deepseek-v2-lite", {"ep": 8, "zero_stage": 3, "recompute": "selective"}),
        ("qwen3-32b", {"tp": 4, "zero_stage": 3, "fsdp": 8}),
    ],
)
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
