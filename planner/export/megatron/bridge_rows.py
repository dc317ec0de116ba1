"""The fields of Megatron-Bridge's configuration that stand for options of Megatron-LM: the same value, or a flag."""

from __future__ import annotations

from typing import NamedTuple

from planner.export.megatron.layout_options import BRIDGE_OF_LAYOUT
from planner.export.megatron.model_options import BRIDGE_OF_MODEL
from planner.export.megatron.plan_arguments import BRIDGE_OF_RUN
from planner.export.megatron.switch_options import BRIDGE_OF_SWITCHES, SWITCHING
from planner.export.trainer_files import Arguments
from planner.trainers.rules.megatron_model import Family

RECIPES: dict[Family, str] = {
    "gpt": "vanilla_gpt_pretrain_config",
    "mla": "deepseek_v3_pretrain_config",
    "gemma2": "gemma2_2b_pretrain_config",
    "gemma3": "gemma3_1b_pretrain_config",
}
"""The recipe whose layers a family of models has; all of its sizes are overridden."""
DOWNLOADS: dict[Family, str] = {"mla": "deepseek-ai/DeepSeek-V3", "gemma2": "google/gemma-2-2b"}
"""Models whose configuration a recipe reads from Hugging Face or its cache."""
TANH = "fast_gelu"
"""Bridge's name of the GELU by a tanh, which fused with a bias is the plain one's."""
MOMENTS = {"bf16": "bfloat16", "fp32": "float32"}
"""Bridge's names of the dtypes of moments."""
MOMENT_FIELDS = {
    "--exp-avg-dtype": "optimizer.exp_avg_dtype",
    "--exp-avg-sq-dtype": "optimizer.exp_avg_sq_dtype",
}


class YarnField(NamedTuple):
    """A number of yarn: Bridge's field of plain attention, that of latent attention, and ours."""

    plain: str
    latent: str
    field: str


YARN = (
    YarnField("model.yarn_rotary_scaling_factor", "model.rotary_scaling_factor", "factor"),
    YarnField(
        "model.yarn_original_max_position_embeddings", "model.original_max_position_embeddings",
        "original_max_position_embeddings",
    ),
    YarnField("model.yarn_beta_fast", "model.beta_fast", "beta_fast"),
    YarnField("model.yarn_beta_slow", "model.beta_slow", "beta_slow"),
    YarnField("model.yarn_mscale", "model.mscale", "mscale"),
    YarnField("model.yarn_mscale_all_dim", "model.mscale_all_dim", "mscale_all_dim"),
)  # fmt: skip

_ROWS = BRIDGE_OF_MODEL | BRIDGE_OF_LAYOUT | BRIDGE_OF_RUN | BRIDGE_OF_SWITCHES
SAME = {option: path for option, path in _ROWS.items() if path}
"""Options whose value a configuration field takes as it is."""
OTHERWISE = {option for option, path in _ROWS.items() if not path} | (SWITCHING - BRIDGE_OF_SWITCHES.keys()) | {
    "--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe", "--fp8-param-gather",
    "--fp4-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag", "--accumulate-allreduce-grads-in-fp32",
}  # fmt: skip
"""Options that Megatron-LM alone has, or whose meaning other fields take."""


class BridgeFlag(NamedTuple):
    """A field that stands for a bare option."""

    field: str
    option: str
    value: bool = True
    """The value where the option is given; the other where it is not."""
    is_written: bool = True


FLAGS = (
    BridgeFlag("model.sequence_parallel", "--sequence-parallel"),
    BridgeFlag("ddp.use_distributed_optimizer", "--use-distributed-optimizer"),
    BridgeFlag("optimizer.use_distributed_optimizer", "--use-distributed-optimizer"),
    BridgeFlag("ddp.overlap_grad_reduce", "--overlap-grad-reduce"),
    BridgeFlag("ddp.overlap_param_gather", "--overlap-param-gather"),
    BridgeFlag("model.gradient_accumulation_fusion", "--no-gradient-accumulation-fusion", False),
    BridgeFlag("model.cross_entropy_loss_fusion", "--cross-entropy-loss-fusion"),
    BridgeFlag("rerun_state_machine.check_for_nan_in_loss", "--no-check-for-nan-in-loss-and-grad", False),
    BridgeFlag("ddp.check_for_nan_in_grad", "--no-check-for-nan-in-loss-and-grad", False),
    BridgeFlag("model.share_embeddings_and_output_weights", "--untie-embeddings-and-output-weights", False),
    BridgeFlag("model.add_bias_linear", "--disable-bias-linear", False),
    BridgeFlag("model.qk_layernorm", "--qk-layernorm"),
    BridgeFlag("model.layernorm_zero_centered_gamma", "--apply-layernorm-1p"),
    BridgeFlag("model.gated_linear_unit", "--swiglu", is_written=False),
    BridgeFlag("mixed_precision.fp16", "--fp16", is_written=False),
    BridgeFlag("mixed_precision.bf16", "--bf16", is_written=False),
    BridgeFlag("dist.use_tp_pp_dp_mapping", "--use-tp-pp-dp-mapping", is_written=False),
    BridgeFlag("comm_overlap.tp_comm_overlap", "--tp-comm-overlap", is_written=False),
    BridgeFlag("comm_overlap.overlap_grad_reduce", "--overlap-grad-reduce", is_written=False),
    BridgeFlag("comm_overlap.overlap_param_gather", "--overlap-param-gather", is_written=False),
    BridgeFlag(
        "comm_overlap.overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", is_written=False
    ),
    BridgeFlag("comm_overlap.delay_wgrad_compute", "--delay-wgrad-compute", is_written=False),
    BridgeFlag(
        "model.account_for_embedding_in_pipeline_split", "--account-for-embedding-in-pipeline-split", is_written=False
    ),
    BridgeFlag("model.account_for_loss_in_pipeline_split", "--account-for-loss-in-pipeline-split", is_written=False),
)  # fmt: skip


def flag_fields(arguments: Arguments) -> dict[str, bool]:
    """The fields that stand for bare options, as the arguments have them."""
    return {flag.field: (flag.option in arguments) == flag.value for flag in FLAGS if flag.is_written}
