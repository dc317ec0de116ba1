"""Megatron-LM gets the arguments that make it do what was planned, or a refusal with the reason."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from tables import beside

from planner.answer import Plan
from planner.export.import_run import read_configuration
from planner.export.launchers import variables
from planner.export.megatron.bridge_files import bridge_overrides
from planner.export.megatron.megatron_files import export_megatron, megatron_arguments
from planner.export.megatron.plan_options import precision
from planner.export.refusal import Inexpressible, priced_for
from planner.export.targets import TRAINERS
from planner.export.trainer_files import ShellText, argv
from planner.layout.evaluate import evaluate
from planner.search.search import plan as search
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import DocumentLength, Parallelism, TrainingSpec

TABLES = beside(__file__)

Planned = Callable[..., Plan]


@pytest.mark.parametrize(("model", "gpus", "layout", "said", "unsaid"), TABLES["arguments_of_a_model"])
def test_arguments_of_a_model(
    planned: Planned, model: str, gpus: int, layout: dict[str, Any], said: dict[str, Any], unsaid: list[str]
) -> None:
    arguments = megatron_arguments(planned(model, gpus, **layout))
    assert {option: arguments[option] for option in said} == said
    assert not arguments.keys() & set(unsaid)


def test_heads_that_are_rotated_in_part(planned: Planned) -> None:
    plan = planned("glm-4.5-air", 64, ep=8, pp=2)
    arguments = megatron_arguments(plan)
    assert arguments["--rotary-percent"] == 0.5
    assert arguments["--add-qkv-bias"] is True
    assert "--rotary-percent" not in megatron_arguments(planned("llama-3.1-8b", 8))
    assert bridge_overrides(plan)["model.rotary_percent"] == 0.5


@pytest.mark.parametrize(("layout", "expected"), TABLES["recompute"])
def test_recompute(planned: Planned, layout: dict[str, Any], expected: dict[str, Any]) -> None:
    arguments = megatron_arguments(planned("llama-3.1-70b", 64, tp=4, pp=4, **layout))
    words = {key: [*value] if isinstance(value, tuple) else value for key, value in arguments.items()}
    assert {key: value for key, value in words.items() if "recompute" in key} == expected


NARROW = {"fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"}


@pytest.mark.parametrize(
    ("dtype", "hardware", "expected"),
    [
        ("bf16", "h100", {"bf16"}),
        ("fp16", "h100", {"fp16", "accumulate_allreduce_grads_in_fp32"}),
        ("fp8", "h100", {"bf16", "fp8_format", "fp8_recipe", "fp8_param_gather"}),
        ("mxfp8", "b200", {"bf16", "fp8_format", "fp8_recipe"} | NARROW - {"fp4_param_gather"}),
        ("nvfp4", "b200", {"bf16", "fp4_format", "fp4_recipe", "fp4_param_gather"}),
    ],
)
def test_precision(planned: Planned, dtype: str, hardware: str, expected: set[str]) -> None:
    plan = planned("llama-3.1-8b", 16, tp=2, dtype=dtype, hardware=hardware)
    assert {option.strip("-").replace("-", "_") for option in precision(plan)} == expected
    assert ("--grad-reduce-in-bf16" in megatron_arguments(plan)) == (dtype not in ("bf16", "fp16"))
    kept = planned("llama-3.1-8b", 16, tp=2, dtype=dtype, hardware=hardware, zero_stage=0)
    assert not {"--fp8-param-gather", "--fp4-param-gather"} & precision(kept).keys(), "they need a sharded optimizer"


@pytest.mark.parametrize(("zero_stage", "present", "absent"), TABLES["data_parallel"])
def test_data_parallel(planned: Planned, zero_stage: int, present: set[str], absent: set[str]) -> None:
    arguments = megatron_arguments(planned("llama-3.1-8b", 16, zero_stage=zero_stage))
    assert present <= arguments.keys()
    assert not absent & arguments.keys()


def test_buckets_are_those_that_were_priced(planned: Planned) -> None:
    """128 Mi parameters; beyond 512 ranks, 512 KiB of bf16 a rank."""
    assert megatron_arguments(planned("llama-3.1-8b", 64))["--ddp-bucket-size"] == 2**27
    assert megatron_arguments(planned("llama-3.1-8b", 2048))["--ddp-bucket-size"] == 2**18 * 2048


def test_a_smaller_shard_group_is_several_optimizer_instances(planned: Planned) -> None:
    for zero_stage in (1, 3):
        arguments = megatron_arguments(planned("llama-3.1-8b", 64, zero_stage=zero_stage, fsdp=16))
        assert arguments["--num-distributed-optimizer-instances"] == 4


@pytest.mark.parametrize(("features", "layout", "option"), TABLES["what_was_priced_is_switched_on"])
def test_what_was_priced_is_switched_on(
    planned: Planned, features: dict[str, Any], layout: dict[str, Any], option: str
) -> None:
    assert option in megatron_arguments(planned("mixtral-8x7b", 64, features=features, **layout))


@pytest.mark.parametrize(("longest", "cp"), [(4096, 2), (1024, 4), (None, 2)])
def test_a_rank_holds_as_many_tokens_of_a_text_as_it_was_planned_to(
    planned: Planned, longest: int | None, cp: int
) -> None:
    plan = planned("llama-3.1-8b", 16, cp=2, seq_length=4096, features={"dynamic_cp": "packs"})
    arguments = megatron_arguments(plan)
    assert (arguments["--max-seqlen-per-dp-cp-rank"], arguments["--calculate-per-token-loss"]) == (2048, True)
    assert "--max-seqlen-per-dp-cp-rank" not in megatron_arguments(planned("llama-3.1-8b", 16, cp=2))
    changed = {} if longest is None else {"--max-seqlen-per-dp-cp-rank": longest}
    run = read_configuration(" ".join(argv(arguments | changed)), "megatron").run
    assert (run["parallelism"]["cp"], run["features"]["dynamic_cp"]) == (cp, "packs")
    assert export_megatron(plan).command.trainer.at_least == "0.21", "no release before it packs"
    texts = (DocumentLength(length=512, share=3), DocumentLength(length=2560, share=1))
    command = export_megatron(
        plan.model_copy(update={"training": plan.training.model_copy(update={"document_lengths": texts})})
    ).command
    drawn = json.loads(command.first_run.arguments["--varlen-mock-dataset-config-json"])
    assert (drawn["mean_seq_len"], drawn["lognormal_sigma"]) == (1024, 0.748)
    single = planned("llama-3.1-8b", 16, cp=2, seq_length=4096, features={"dynamic_cp": "texts"})
    assert export_megatron(single).command.training_run.arguments["--tokenizer-type"] == "SFTTokenizer"


def test_the_dispatcher_that_was_priced(planned: Planned) -> None:
    alone = megatron_arguments(planned("mixtral-8x7b", 64, pp=2, vpp=2))
    assert alone["--moe-token-dispatcher-type"] == "alltoall", "DeepEP needs more than one rank"
    hopper = planned("mixtral-8x7b", 64, ep=8, pp=2, vpp=2, features={"ep_overlap": True})
    assert megatron_arguments(hopper)["--moe-flex-dispatcher-backend"] == "deepep"
    rack = planned("mixtral-8x7b", 64, ep=8, hardware="gb200")
    assert megatron_arguments(rack)["--moe-flex-dispatcher-backend"] == "hybridep"


def test_latent_projections_have_no_user_buffers(planned: Planned) -> None:
    assert "--tp-comm-overlap" in megatron_arguments(planned("llama-3.1-8b", tp=2))
    assert "--tp-comm-overlap" not in megatron_arguments(planned("deepseek-v2", tp=2, ep=8))


def test_gathers_hide_only_where_reductions_do(planned: Planned) -> None:
    exported = export_megatron(planned("llama-3.1-8b", features={"overlap_grad_reduce": False}))
    assert any("gathers of parameters" in note for note in exported.notes)
    assert not any("gathers of parameters" in note for note in export_megatron(planned("llama-3.1-8b")).notes)


def test_exchanges_of_experts_are_hidden_where_they_can_be(planned: Planned) -> None:
    option = "--overlap-moe-expert-parallel-comm"
    on = {"ep_overlap": True}
    assert option in megatron_arguments(planned("mixtral-8x7b", 64, ep=8, pp=2, vpp=2, features=on))
    assert option not in megatron_arguments(planned("mixtral-8x7b", 64, ep=8, pp=2, vpp=2)), "nothing hides unasked"
    assert refused(planned("mixtral-8x7b", 64, ep=8, pp=2, features=on)) == ["ep_overlap"]
    assert refused(planned("mixtral-8x7b", 64, ep=8, recompute="full", features=on)) == ["ep_overlap"]


def refused(plan: Plan) -> list[str]:
    with pytest.raises(Inexpressible) as caught:
        megatron_arguments(plan)
    assert caught.value.exit_code == 2
    return [reason.name for reason in caught.value.reasons]


@pytest.mark.parametrize(("model", "options", "hint"), TABLES["the_hint_is_what_would_help"])
def test_the_hint_is_what_would_help(planned: Planned, model: str, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(Inexpressible) as caught:
        megatron_arguments(planned(model, 64, **options))
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(("model", "seq_length"), [("kimi-k2", 4096), ("llama-3.2-1b", 8192)])
def test_stretched_positions_that_it_cannot_say_are_left_out_below_their_first_length(
    planned: Planned, model: str, seq_length: int
) -> None:
    """The model is trained as it was before its positions were stretched, and a note says so; beyond it is refused."""
    within, beyond = (planned(model, 64, seq_length=length) for length in (seq_length, 2 * seq_length))
    written = TRAINERS["megatron"].write(within)
    assert written.command is not None
    options = written.command.arguments
    assert "--use-rope-scaling" not in options
    assert options.get("--rotary-scaling-factor", 1.0) == 1.0
    (note,) = [note for note in written.notes if note.startswith("positions are not stretched")]
    assert f"within the {seq_length:,} positions" in note
    assert note.split(":")[0] in written.command.comments
    assert refused(beyond) == ["rope_scaling"]


def test_a_norm_of_queries_that_core_adds_is_a_note(planned: Planned) -> None:
    """Bridge has a recipe for such a model; Megatron-LM's options say it up to core 0.18."""
    plan = planned("deepseek-v2-lite", 64, runtime="bridge")
    assert any("normed once more" in note for note in TRAINERS["bridge"].write(plan).notes)
    plan = planned("deepseek-v2-lite", 64)
    older = plan.model_copy(update={"runtime_spec": plan.runtime_spec.model_copy(update={"version": "0.18"})})
    assert not any("normed once more" in note for note in TRAINERS["megatron"].write(older).notes)


def test_norms_of_queries_are_like_those_of_layers(planned: Planned) -> None:
    model = load_model("qwen3-8b").model_copy(update={"norm": "layernorm", "norm_bias": True})
    assert refused(planned(model, 64)) == ["qk_norm"]


def test_a_plan_that_recomputes_by_stage_is_refused(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 16, pp=4, recompute="full", recompute_num_layers=3)
    first = plan.stages[0].model_copy(update={"recompute": {"full": 5, "none": 3}})
    best = plan.best.model_copy(update={"stages": (first, *plan.stages[1:])})
    assert refused(plan.model_copy(update={"best": best})) == ["recompute_per_stage"]


def test_yaml_holds_the_same_arguments(planned: Planned) -> None:
    plan = planned("qwen3-30b-a3b", 64, tp=2, pp=4, vpp=3, ep=8, recompute="selective", tokens=1e12)
    exported = export_megatron(plan)
    data = yaml.safe_load(exported.files[0].text)
    assert data["ENV_VARS"]["CUDA_DEVICE_MAX_CONNECTIONS"] == 1
    command = exported.command
    assert command is not None
    words = []
    for option, value in data["MODEL_ARGS"].items():
        words += [option] if value is True else [option, *(map(str, value) if isinstance(value, list) else [value])]
    assert [_plain(word) for word in words] == [
        _plain(word) for word in argv({**command.arguments, **command.training_run.arguments})
    ]


def _plain(word: Any) -> Any:
    """Numbers compare by value, whatever their spelling; variables without the quotes of a shell."""
    word = word.unquoted if isinstance(word, ShellText) else word
    try:
        return float(word)
    except (TypeError, ValueError):
        return word


@pytest.mark.parametrize(
    ("model", "hardware", "dtype", "recipe"), TABLES["scales_are_those_that_a_model_was_published_with"]
)
def test_scales_are_those_that_a_model_was_published_with(
    planned: Planned, model: str, hardware: str, dtype: str, recipe: str
) -> None:
    plan = planned(model, 64, ep=8 if model == "deepseek-v3" else 1, hardware=hardware, dtype=dtype)
    assert precision(plan)["--fp8-recipe"] == recipe


@pytest.mark.parametrize("trainer", ["megatron", "bridge", "torchtitan", "primus-megatron"])
def test_a_narrow_dtype_is_no_consent_to_narrow_gradients(trainer: str) -> None:
    """Of a searched plan, of a given layout, and of either under another trainer."""
    training = TrainingSpec(seq_length=4096, global_batch_size=64, dtype="fp8")
    cluster = ClusterSpec(hardware=load_hardware("mi300x" if trainer.startswith("primus") else "h100"), num_gpus=8)
    given = evaluate("llama-3.1-8b", cluster, training, Parallelism(dp=8, zero_stage=2), runtime=trainer)
    plans = [given] if trainer == "torchtitan" else [given, search(load_model("llama-3.1-8b"), cluster, training)]
    for plan in (priced_for(plan, "megatron") for plan in plans):
        assert "--grad-reduce-in-bf16" not in megatron_arguments(plan)


@pytest.mark.parametrize("hardware", ["a100", "h100", "b200", "rtx-4090"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"zero_stage": 3, "tp": 2}, {"ep": 8}, {"tp": 2, "ep": 4}])
@pytest.mark.parametrize("overlaps", [False, True])
def test_queues_to_the_gpu_are_those_that_megatron_asks_for(
    planned: Planned, hardware: str, layout: dict[str, Any], overlaps: bool
) -> None:
    """validate_args of core 0.14 to 0.20: 1 with tp or cp up to Hopper, but for FSDP and overlapped experts."""
    features = {"ep_overlap": True, "dispatcher": "alltoall"} if overlaps else {}
    plan = planned("qwen3-30b-a3b", 8, hardware=hardware, features=features, **layout)
    number = variables(plan, "environment-connections").get("CUDA_DEVICE_MAX_CONNECTIONS")
    shards, is_split = plan.parallelism.zero_stage >= 2, plan.parallelism.tp * plan.parallelism.cp > 1
    is_free = hardware == "b200" or shards or (overlaps and plan.parallelism.ep > 1)
    assert number == "1" if is_split and not is_free else number != "1"


@pytest.mark.parametrize(("name", "program", "says"), TABLES["hybrids_and_delta_nets_come_back"])
def test_hybrids_and_delta_nets_come_back(planned: Planned, name: str, program: str, says: dict[str, Any]) -> None:
    plan = planned(name, 64, pp=2, ep=8)
    arguments = megatron_arguments(plan)
    assert says.items() <= arguments.items()
    files = export_megatron(plan)
    assert program in files.command.program
    back = read_configuration(f"python {files.command.program} {shlex.join(argv(arguments))}")
    model = ModelSpec.model_validate(back.complete(num_gpus=64, hardware="h100")["model"])
    for field in ("layers", "mamba", "linear_attention", "num_nextn_predict_layers"):
        assert getattr(model, field) == getattr(plan.model.spec, field), field
    assert back.unknown == {}
    assert getattr(model.moe, "latent_size", 0) == getattr(plan.model.spec.moe, "latent_size", 1)
