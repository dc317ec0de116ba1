"""Settings that a plan leaves open: length, optimizer and saves of a run, and usual numbers of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby

from planner.answer import Plan
from planner.export.trainer_files import notes_of, settings
from planner.months.losses import load_facts
from planner.months.whole_run import save_interval_s
from planner.record import record
from planner.specs.base import Fields, Texts
from planner.specs.model import ModelSpec
from planner.specs.model_parts import OptimizerDefaults
from planner.trainers.rules.facts import has_groups, has_local_base, has_usual_scale

TOKENS_PER_PARAMETER = 20
"""Tokens for each active parameter where no number is planned: Hoffmann et al. (arXiv:2203.15556)."""
TUNING_STEPS = 1000
"""Steps of a fine-tuning whose plan states no tokens. A first value."""
TUNING_RATE = 2e-5
"""Rate of a fine-tuning of whole models: the default of TRL's SFTConfig."""
TUNING: Fields = {"learning_rate": TUNING_RATE, "min_learning_rate": 0.0, "decay_style": "linear"}
"""The fields of an optimizer that fine-tuning does not have from the model's pre-training."""
_RATES = ((10e9, 3e-4, 3e-5), (100e9, 1.5e-4, 1.5e-5), (math.inf, 8e-5, 8e-6))
"""Active parameters up to which a rate, and its tenth at the end, are usual: Llama 3 (arXiv:2407.21783, Table 3)."""
_WARMUP_STEPS = 2000
_WARMUP_FRACTION = 0.1
"""Share of the steps that the warm-up takes at most."""
_BETWEEN_KEPT_SAVES_S = 6 * 3600.0
"""Seconds between the checkpoints that are kept, beside the latest: each of a large model takes terabytes."""
FIRST_RUN_STEPS = 20
"""Steps of the run that is compared with the plan: the first ones compile, tune and fill caches."""
EVALUATION_STEPS = 10
_FORWARD_SHARE = 1 / 3
"""Share of a step's time that its forward takes, which is all that an evaluation runs."""
_TIMEOUT_MINUTES = 10
"""Minutes that torch waits for a collective unless told."""
_INIT_S_PER_RANK = 1047 / 2048
"""Seconds that groups of 2,048 ranks took to start without tricks, over their number (MegaScale, arXiv:2402.15627)."""


@record
class RunSettings:
    """The settings of a run, in steps of the plan's batch."""

    num_steps: int
    optimizer: OptimizerDefaults
    warmup_steps: int
    save_interval_steps: int
    """The interval that loses the least time to saves and failures (docs/MONTHS.md)."""
    kept_save_interval_steps: int
    """Steps between the checkpoints that stay on disk, a multiple of the steps between saves."""
    evaluation_interval_steps: int
    init_timeout_minutes: int
    """Minutes for the start, when every rank meets every other."""
    timeout_minutes: int
    """Minutes for an exchange after the start."""
    notes: Texts
    """The origins of length and optimizer, for the header."""

    evaluation_steps: int = EVALUATION_STEPS
    first_run_steps: int = FIRST_RUN_STEPS

    @property
    def last_decay_step(self) -> int:
        """The step at which the rate is lowest, which comes after the warm-up."""
        return max(self.num_steps, self.warmup_steps + 1)

    @property
    def init_timeout_s(self) -> int:
        return 60 * self.init_timeout_minutes

    @property
    def timeout_s(self) -> int:
        return 60 * self.timeout_minutes

    @property
    def decay_steps(self) -> int:
        """Steps over which the rate falls, the last ones of the run."""
        return max(1, round(self.optimizer.decay_fraction * (self.num_steps - self.warmup_steps)))


def run_settings(plan: Plan) -> RunSettings:
    """The settings of the plan's run: planned, published with the model, or defaults that the notes name."""
    training, model = plan.training, plan.model
    published = model.spec.training.optimizer if model.spec.training else None
    optimizer = published or _defaults(model.num_active_parameters)
    usual_tokens = TOKENS_PER_PARAMETER * model.num_active_parameters
    if training.starts_trained:
        optimizer = optimizer.model_copy(update=TUNING)
        usual_tokens = TUNING_STEPS * training.tokens_per_step
    tokens = training.tokens or usual_tokens
    num_steps = max(1, round(tokens / training.tokens_per_step))
    ranks = plan.parallelism.num_gpus_used
    save_interval_steps = max(1, round(_save_interval_s(plan) / plan.best.step.step_s))
    kept_saves = max(1, round(_BETWEEN_KEPT_SAVES_S / (save_interval_steps * plan.best.step.step_s)))
    evaluated = load_facts().evaluation_fraction.value
    return RunSettings(
        num_steps=num_steps,
        optimizer=optimizer,
        warmup_steps=min(optimizer.warmup_steps, max(1, int(_WARMUP_FRACTION * num_steps))),
        save_interval_steps=save_interval_steps,
        kept_save_interval_steps=kept_saves * save_interval_steps,
        evaluation_interval_steps=math.ceil(_FORWARD_SHARE * EVALUATION_STEPS / evaluated),
        init_timeout_minutes=max(_TIMEOUT_MINUTES, 5 * math.ceil(_INIT_S_PER_RANK * ranks / 300)),
        timeout_minutes=_TIMEOUT_MINUTES,
        notes=tuple(
            notes_of(
                "run", plan, num_steps=num_steps, tokens=_tokens(tokens), optimizer=optimizer,
                tokens_per_parameter=TOKENS_PER_PARAMETER,
            )
        ),
    )  # fmt: skip


def _save_interval_s(plan: Plan) -> float:
    return save_interval_s(
        plan.cluster,
        plan.training,
        plan.parallelism.num_gpus_used,
        checkpoint_bytes=plan.checkpoint_bytes,
        asynchronous=plan.runtime_spec.asynchronous_checkpoints,
    )


def _defaults(num_active_parameters: float) -> OptimizerDefaults:
    rate, least = next((rate, least) for size, rate, least in _RATES if num_active_parameters < size)
    return OptimizerDefaults(learning_rate=rate, min_learning_rate=least, warmup_steps=_WARMUP_STEPS)


def _tokens(number: float) -> str:
    """A number of tokens in millions, billions or trillions."""
    scale, unit = (1e12, "T") if number >= 1e12 else (1e9, "B") if number >= 1e9 else (1e6, "M")
    return f"{number / scale:.3g}{unit}"


ROTARY_BASE = 10_000.0
"""Base of rotary frequencies where the model states none: every trainer's."""
NORM_EPS = 1e-5
"""Every trainer's."""
AUX_LOSS = 1e-3
"""Weight of a load-balancing loss that was not published: Megatron-Bridge's for Qwen3, OLMoE and GLM-4.5."""
BIAS_UPDATE_RATE = 1e-3
"""DeepSeek-V3 (arXiv:2412.19437), section 4.2; Megatron-LM's and torchtitan's."""
MTP_LOSS = 0.1
"""DeepSeek-V3 (arXiv:2412.19437), section 4.2, after its first 10T tokens; Megatron-LM's."""


def stated(model: ModelSpec) -> ModelSpec:
    """The same model with a value for each field that the spec leaves to the trainer.

    A mixture without a published loss has `AUX_LOSS`, or none where a bias steers its load.
    """
    usual = {
        "norm_eps": NORM_EPS, "rotary_base": ROTARY_BASE, "mtp_loss": MTP_LOSS, "bias_update_rate": BIAS_UPDATE_RATE,
    }  # fmt: skip
    names = {"model": model, "usual": usual, "has_usual_scale": has_usual_scale, "has_local_base": has_local_base}
    update = settings("stated", **names, rotates=model.position_embedding == "rope")
    if (moe := model.moe) is not None:
        unsaid = 0.0 if model.balances_by_bias else AUX_LOSS
        loss = unsaid if moe.router_aux_loss_coef is None else moe.router_aux_loss_coef
        of_moe = settings("stated-mixture", model=model, moe=moe, usual=usual, loss=loss, grouped=has_groups(moe))
        update["moe"] = moe.model_copy(update=of_moe)
    return model.model_copy(update=update)


def notes_on_model(model: ModelSpec) -> list[str]:
    """The fields that the model's spec leaves open, and what the files say for each."""
    unstated = settings("unstated", model=model, given=stated(model))
    said = [f"{name} {value:g}" for name, value in unstated.items()]
    return [f"the model's spec does not state these, which are usual: {', '.join(said)}"] if said else []


def listed(flags: Iterable[bool]) -> str:
    """Flags of layers as Megatron's patterns have them: `([0]*3+[1]*58)`."""
    runs = [(int(key), len(list(group))) for key, group in groupby(flags)]
    return "(" + "+".join(f"[{key}]*{length}" for key, length in runs) + ")"
