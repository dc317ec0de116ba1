"""Megatron-LM's own refusals: a condition of its checks, the options that meet it, and the rule that tells."""

from __future__ import annotations

import pytest

from planner.errors import SpecError
from planner.export.import_run import read_configuration
from planner.export.megatron.option_rows import options_of, table
from planner.export.megatron.script_reading import named_refusals, refusals

_MODEL = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16"
CASES: dict[str, str] = {
    "layers_per_stage": "--num-layers 46 --pipeline-model-parallel-size 4",
    "layers_per_virtual_stage": f"{_MODEL} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4",
    "layers_of_virtual_stage": f"{_MODEL} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4",
    "empty_end": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 0",
    "middle_layers": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 4",
    "virtual_stages_of_ends": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3 "
    "--num-virtual-stages-per-pipeline-rank 2",
    "virtual_stages_of_middle": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 "
    "--decoder-last-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    "ends_given_twice": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3 "
    "--account-for-loss-in-pipeline-split",
    "layout_given_twice": "--pipeline-model-parallel-layout Et*24L --account-for-loss-in-pipeline-split",
    "virtual_stages_given_twice": "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
    "per_stage_beside_ends": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 "
    "--num-layers-per-virtual-pipeline-stage 2",
    "full_without_method": "--recompute-granularity full --recompute-num-layers 1",
    "full_without_layers": "--recompute-granularity full --recompute-method uniform",
    "selective_with_method": "--recompute-granularity selective --recompute-method uniform",
    "moe_act_without_grouped": f"{_MODEL} --recompute-granularity selective --recompute-modules moe_act",
    "gather_without_reduce": "--overlap-param-gather --use-distributed-optimizer",
    "gather_without_shards": "--overlap-param-gather --overlap-grad-reduce",
    "torch_fsdp": "--use-torch-fsdp2 --use-distributed-optimizer",
    "fsdp_optimizer": "--use-megatron-fsdp --optimizer muon",
    "fsdp_format": "--use-megatron-fsdp --ckpt-format torch_dist",
    "fp16_and_bf16": "--fp16 --bf16",
    "fp4_and_fp8": "--fp4-format e2m1 --fp8-format hybrid",
    "precision_aware_without_shards": "--use-precision-aware-optimizer",
    "offload_without_shards": "--optimizer-cpu-offload",
    "offload_with_pipeline": "--cpu-offloading-num-layers 2 --recompute-granularity selective",
    "overlap_without_sequence_parallel": "--tp-comm-overlap --tensor-model-parallel-size 2",
    "flex_without_backend": "--moe-enable-deepep --moe-token-dispatcher-type alltoall",
    "shared_overlap_with_allgather": "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 1024",
    "top_1_after_softmax": "--num-experts 8 --moe-router-topk 1",
    "bias_of_split_experts": f"{_MODEL} --num-experts 8 --expert-tensor-parallel-size 2",
    "bias_of_experts_split_unasked": f"{_MODEL} --num-experts 8 --tensor-model-parallel-size 2",
    "experts_of_none": f"{_MODEL} --expert-model-parallel-size 8",
    "capacity_with_balancing": "--moe-expert-capacity-factor 1.0 --moe-router-load-balancing-type sinkhorn",
    "padded_capacity_with_flex": "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0 "
    "--moe-token-dispatcher-type flex",
    "shared_experts_recomputed": "--recompute-granularity selective --recompute-modules shared_experts "
    "--moe-shared-expert-overlap --moe-token-dispatcher-type alltoall",
    "latent_projection_of_none": f"{_MODEL} --recompute-granularity selective --recompute-modules mla_up_proj",
    "delayed_scales_recomputed": "--fp8-format hybrid --recompute-granularity selective --recompute-modules layernorm",
    "moe_recomputed_twice": "--moe-layer-recompute --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "narrow_weights_alone": "--fp8-param-gather --use-distributed-optimizer",
    "narrow_weights_without_shards": "--fp8-param-gather --fp8-format hybrid",
    "fsdp_connections": "--use-megatron-fsdp",
    "padded_capacity": "--moe-pad-expert-input-to-capacity",
    "positions_below_sequence": "--max-position-embeddings 2048 --seq-length 4096",
    "graph_given_twice": "--cuda-graph-scope attn --cuda-graph-modules attn",
    "graphs_of_two_kinds": "--enable-cuda-graph --external-cuda-graph",
    "group_sizes": f"{_MODEL} --group-query-attention --num-query-groups 3",
    "heads_without_channels": "--hidden-size 2048 --num-attention-heads 24",
}  # fmt: skip


LOST = {
    "ends_without_pipeline": "--num-layers 20 --decoder-first-pipeline-num-layers 1",
    "no_middle": f"{_MODEL} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
    "--decoder-last-pipeline-num-layers 3",
}
"""Options that build fewer layers than the model has."""


def broken(text: str) -> set[str]:
    around = {"CUDA_DEVICE_MAX_CONNECTIONS": ["1"]}
    return {name for name, _ in named_refusals({**options_of(text.split()), **around})}


def test_every_refusal_has_a_case() -> None:
    assert table()["refused"].keys() - CASES.keys() == set()


@pytest.mark.parametrize("name", CASES)
def test_a_condition_is_told_by_its_row(name: str) -> None:
    assert name in broken(CASES[name])


@pytest.mark.parametrize(
    "text",
    [
        f"{_MODEL} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 --bf16",
        f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5 "
        "--decoder-last-pipeline-num-layers 5",
        f"{_MODEL} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer --fp8-format hybrid --bf16",
    ],
)
def test_what_starts_is_not_refused(text: str) -> None:
    assert broken(text) == set()


@pytest.mark.parametrize("name", LOST)
def test_fewer_layers_than_the_model_has_are_no_price(name: str) -> None:
    with pytest.raises(SpecError, match=r"builds 1 of 20 layers|18 layers are left for 0 middle stages"):
        refusals(options_of(LOST[name].split()))


def test_a_model_of_the_users_is_held_against_the_stages() -> None:
    text = "megatron sft --load X --pipeline_model_parallel_size 4 --max_length 4096"
    imported = read_configuration(text)
    imported.complete(hardware="h100", num_gpus=64, model="glm-4.5-air")
    assert imported.refused == ["46 layers are no multiple of the 4 pipeline stages"]


def test_what_the_parser_alone_refuses_is_none_of_bridges() -> None:
    options = options_of(["--tp-comm-overlap", "--tensor-model-parallel-size", "1"])
    assert [*named_refusals(options, is_parsed=False)] == []
    assert [name for name, _ in named_refusals(options)] == ["overlap_without_sequence_parallel"]
