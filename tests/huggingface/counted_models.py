"""Real models of transformers and peft on fake tensors: parameters, and the bytes that a training step takes.

Weights are made from a config and hold no memory; every storage counts from the operator that makes it until nothing
refers to it. A step is the one that `transformers.Trainer(bf16=True)` runs: weights in bf16, forward under
`torch.autocast`, the model's own loss, backward, clipped gradients, fused AdamW, gradients set to None.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from finetuning_jobs import Figures, Job
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoModelForCausalLM, masking_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tools.counted_bytes import MOMENTS, BytesAlive, gpu_kernels

BLOCK, BLOCKS = 64, 256
"""Weights that share a scale in 4 bits, and scales that share one of fp32 (bitsandbytes, double quantization)."""


@dataclass(frozen=True)
class Counted(Figures):
    """Figures of a job as torch's allocator would count them on a GPU."""

    peak_label: str = ""
    """The pass that ran at the peak."""


class _Account(BytesAlive):
    """Adds up gradients of a weight that two products share in place, as autograd does with tensors that are real."""

    table: torch.Size | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and self.label == "backward" and args[0].shape == self.table:
            func = torch.ops.aten.add_.Tensor
        return super().__torch_dispatch__(func, types, args, kwargs)


def count(job: Job) -> Counted:
    """Build the job's model on fake tensors and count its second step, when the optimizer has its states."""
    account, fake = _Account(MOMENTS), FakeTensorMode()
    with _quiet(), fake:
        model = _model(job)
    with _quiet(), gpu_kernels(fuses_norms=False), _fused_dropout(), _one_document(), fake, account:
        for tensor in _tensors(model):
            account.count(tensor)
        account.table = model.get_input_embeddings().weight.shape
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        _step(job, model, optimizer, account)
        gc.collect()
        static_bytes = account.num_bytes
        account.reset_peak()
        kept_bytes = _step(job, model, optimizer, account)
    return Counted(
        parameters=_num_parameters(model), trained_parameters=sum(weight.numel() for weight in trained),
        static_bytes=static_bytes, kept_bytes=kept_bytes, peak_bytes=account.peak_bytes,
        peak_label=account.peak_label,
    )  # fmt: skip


def _step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, account: BytesAlive) -> int:
    """Run a step; the bytes that the last forward and its loss leave behind."""
    ids = torch.zeros((job.num_microbatches, job.micro_batch_size, job.seq_length), dtype=torch.int64)
    kept_bytes = 0
    for batch in ids:
        before = account.num_bytes
        account.label = "forward"
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        kept_bytes = account.num_bytes - before
        account.label = "backward"
        loss.backward()
        del loss
    account.label = "optimizer"
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    account.label = ""
    return kept_bytes


def _model(job: Job) -> Any:
    given = dict(job.config)
    config = CONFIG_MAPPING[given.pop("model_type")](**given)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if job.base_bits == 4:
        _pack(model)
        model.is_loaded_in_4bit = True
    if job.rank:
        targets: Any = job.targets[0] if job.targets == ("all-linear",) else list(job.targets)
        lora = LoraConfig(r=job.rank, target_modules=targets, lora_dropout=job.dropout, task_type="CAUSAL_LM")
        # fake tensors cannot be moved to the device that they are on
        with patch.object(nn.Module, "to", lambda module, *_, **__: module):
            model = get_peft_model(model, lora)
    if job.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if job.rank:
            model.enable_input_require_grads()
    if job.base_bits == 4:
        for weight in model.parameters():  # trl's SFTTrainer
            if weight.requires_grad:
                weight.data = weight.data.to(torch.bfloat16)
    model.train()
    gc.collect()
    return model


def _pack(model: nn.Module) -> None:
    """Put bitsandbytes' own layers of 4 bits in place of all products but the head, their weights packed."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    for module in list(model.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is not nn.Linear or name == "lm_head":
                continue
            rows, columns = linear.weight.shape
            blocks = -(-rows * columns // BLOCK)
            with unset_fake_temporarily():
                packed = bnb.nn.Linear4bit(1, 1, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
            packed.in_features, packed.out_features = columns, rows
            weight: Any = nn.Parameter(torch.empty(((rows * columns + 1) // 2, 1), dtype=torch.uint8), False)
            scales = QuantState(
                absmax=torch.empty(-(-blocks // BLOCKS)), code=torch.empty(256), blocksize=BLOCKS, dtype=torch.float32
            )
            weight.quant_state = QuantState(
                absmax=torch.empty(blocks, dtype=torch.uint8), shape=torch.Size((rows, columns)),
                code=torch.empty(16), blocksize=BLOCK, quant_type="nf4", dtype=torch.bfloat16,
                offset=torch.empty(()), state2=scales,
            )  # fmt: skip
            weight.compress_statistics, weight.quant_type = True, "nf4"
            packed.weight, packed.bias = weight, linear.bias
            setattr(module, name, packed)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, and the scales and codes of packed weights."""
    yield from model.buffers()
    for weight in model.parameters():
        yield weight
        state = getattr(weight, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)


def _num_parameters(model: nn.Module) -> int:
    """Parameters of the model, those of 4 bits by the shape that they stand for."""
    states = ((weight, getattr(weight, "quant_state", None)) for weight in model.parameters())
    return sum(weight.numel() if state is None else state.shape.numel() for weight, state in states)


@contextmanager
def _one_document() -> Iterator[None]:
    """Positions that have no values count up from zero, so that attention needs no mask."""
    with patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None):
        yield


@contextmanager
def _fused_dropout() -> Iterator[None]:
    """Dropout keeps a mask of one byte an element, as in the kernel that GPUs take."""

    def dropout(x: torch.Tensor, probability: float, train: bool) -> torch.Tensor:
        return torch.ops.aten.native_dropout(x, probability, train)[0] if train and probability else x

    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", dropout, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
