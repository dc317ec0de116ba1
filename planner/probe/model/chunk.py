"""One virtual stage as a module: decoder layers, embedding, head and multi-token prediction, and their values.

Activations are [seq/tp, batch, hidden]; where cp splits sequences, seq is this rank's share of one. What these modules
keep for backward is what the operator lists of the `torch-eager` runtime say; tests hold the two against each other. A
parameter has the same values whatever its sharding, so that runs can be compared bit for bit.
"""

from __future__ import annotations

from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from planner.probe.model.attention import Attention, AttentionTables, LatentAttention
from planner.probe.model.layers import INITIAL_STD, DenseMLP, Linear, MoE, Norm
from planner.probe.model.peers import (
    Surroundings,
    hidden_to_sequence,
    leave,
    leave_by_view,
    mark,
    marks_of,
    recomputable,
    shard,
    to_fp32,
)
from planner.probe.model.traced import TracedLayer
from planner.probe.run import ChunkSpec
from planner.specs.model import LayerKind, ModelSpec


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with a norm behind each half where the model has post norms."""

    def __init__(self, model: ModelSpec, kind: LayerKind, around: Surroundings) -> None:
        super().__init__()
        self.around = around
        self.mlp_name = "moe" if kind.mlp == "moe" else "mlp"
        self.attention_norm = Norm(model.hidden_size, model)
        self.attention: nn.Module = (
            Attention(model, kind, around) if model.mla is None else LatentAttention(model, model.mla, kind, around)
        )
        self.mlp_norm = Norm(model.hidden_size, model)
        if kind.mlp == "moe":
            assert model.moe is not None
            self.mlp: nn.Module = MoE(model, model.moe, around)
        else:
            assert model.intermediate_size is not None
            self.mlp = DenseMLP(model, model.intermediate_size, around)
        self.attention_post_norm = Norm(model.hidden_size, model) if model.post_norms else nn.Identity()
        self.mlp_post_norm = Norm(model.hidden_size, model) if model.post_norms else nn.Identity()

    def forward(self, x: Tensor, tables: AttentionTables) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), tables))
        if self.mlp_name == "mlp":  # recomputed with its norm; a mixture's is not, whose router reads it too
            x = x + self.mlp_post_norm(recomputable("mlp", self.normed_mlp, self.around)(x))
        else:
            x = x + self.mlp_post_norm(recomputable(self.mlp_name, self.mlp, self.around)(self.mlp_norm(x)))
        return x

    def normed_mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.mlp_norm(x))
        return out


class Embedding(nn.Module):
    """Token rows sharded over tp, learned positions, and a norm where the model has one."""

    def __init__(self, model: ModelSpec, around: Surroundings) -> None:
        super().__init__()
        self.around = around
        self.rows = model.vocab_size // around.tp.size
        self.weight = nn.Parameter(torch.empty(self.rows, model.hidden_size))
        mark(self.weight, shard=(0, ((model.vocab_size, self.rows),)))
        learned = model.position_embedding == "learned"
        positions = torch.empty(model.max_position_embeddings or 0, model.hidden_size)
        self.positions = nn.Parameter(positions) if learned else None
        mark(self.positions, partial="sequence")
        # weights of the model that no layer reads, which only take memory
        self.rest = nn.Parameter(torch.empty(model.num_other_parameters)) if model.num_other_parameters else None
        self.norm = Norm(model.hidden_size, model) if model.embedding_norm else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [seq, batch] → [seq/tp, batch, hidden]."""
        tp = self.around.tp
        if tp.size == 1:
            x = functional.embedding(tokens, self.weight)
        else:
            local = tp.local_rows(tokens, self.rows)
            inside = (local >= 0) & (local < self.rows)
            x = functional.embedding(local.where(inside, 0), self.weight).where(inside.unsqueeze(-1), 0)
            x = leave_by_view(x, tp) if tp.sequence_parallel else leave(x, tp)
        if self.positions is not None:
            positions = shard(self.positions[: tokens.shape[0] * self.around.cp.size], self.around.cp)
            first = tp.rank * x.shape[0] if tp.sequence_parallel else 0
            x = x + positions[first : first + x.shape[0]].unsqueeze(1)
        out: Tensor = self.norm(x)
        return out


class Head(nn.Module):
    """Final norm, vocabulary-parallel logits, mean cross-entropy in fp32."""

    def __init__(self, model: ModelSpec, around: Surroundings) -> None:
        super().__init__()
        self.tp = around.tp
        self.norm = Norm(model.hidden_size, model)
        self.output = Linear(model.hidden_size, model.vocab_size, around, parallel="column")

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """x [seq/tp, batch, hidden] and labels [seq, batch] → the loss, a scalar."""
        logits = to_fp32(self.output(self.norm(x))).flatten(0, 1)
        return self.tp.cross_entropy(logits, labels.flatten())


class MTPBlock(nn.Module):
    """One multi-token-prediction block (DeepSeek-V3 §2.2) without the embedding and head it shares."""

    def __init__(self, model: ModelSpec, around: Surroundings) -> None:
        super().__init__()
        self.tp = around.tp
        self.embedding_norm = Norm(model.hidden_size, model)
        self.hidden_norm = Norm(model.hidden_size, model)
        self.projection = Linear(2 * model.hidden_size, model.hidden_size, around, parallel="column")
        self.layer = DecoderLayer(model, model.layers[-1], around)

    def forward(self, x: Tensor, embedded: Tensor, tables: AttentionTables) -> Tensor:
        """Hidden states and embeddings of the next tokens, both [seq/tp, batch, hidden] → hidden states."""
        joined = torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), dim=-1)
        x = self.projection(joined)
        x = x if self.tp.size == 1 else hidden_to_sequence(x, self.tp)
        out: Tensor = self.layer(x, tables)
        return out


MTP_LOSS_WEIGHT = 0.3
"""DeepSeek-V3 §4.2: weight of the multi-token-prediction loss for most of its training."""


class Chunk(nn.Module):
    """Embedding, decoder layers, multi-token prediction and head, of those that the virtual stage holds.

    Parameters are named by their place in the whole model, so that the same name means the same values on any rank.
    """

    def __init__(self, model: ModelSpec, spec: ChunkSpec, around: Surroundings) -> None:
        super().__init__()
        self.spec = spec
        self.model = model
        self.cp = around.cp
        self.embedding = Embedding(model, around) if spec.embedding else None
        self.layers = nn.ModuleDict()
        before: list[nn.Parameter] = []
        for number in range(spec.first_layer, spec.last_layer):
            kind = model.layers[number]
            layer = (
                DecoderLayer(model, kind, around) if model.traced is None else TracedLayer(model, kind, around, before)
            )
            self.layers[str(number)] = layer
            before = list(layer.parameters())
        self.head = Head(model, around) if spec.head else None
        self.mtp = nn.ModuleList()
        if spec.mtp:
            self.mtp.extend(MTPBlock(model, around) for _ in range(model.num_nextn_predict_layers))
        # the embedding of the next tokens: this chunk's own, or a replica kept equal to the first stage's
        self.mtp_embedding = Embedding(model, around) if spec.mtp and not spec.embedding else None
        if model.tie_word_embeddings and self.head is not None:
            if self.embedding is not None:
                self.head.output.weight = self.embedding.weight
            mark(self.head.output.weight, replica="embedding.weight")
        if self.embedding is not None:
            mark(self.embedding.weight, replica="embedding.weight")
        if self.mtp_embedding is not None:
            for name, parameter in self.mtp_embedding.named_parameters():
                mark(parameter, replica=f"embedding.{name}")

    def forward(self, x: Tensor | None, tokens: Tensor, labels: Tensor, tables: AttentionTables) -> Tensor:
        """Hidden states [seq/(cp·tp), batch, hidden] (of this rank's share of tokens [seq, batch] where it holds the
        embedding), or the loss of that share."""
        hidden = cast(Tensor, self.embedding(shard(tokens, self.cp)) if self.embedding is not None else x)
        for index, layer in enumerate(self.layers.values()):
            if index < self.spec.num_recomputed:
                hidden = checkpoint(layer, hidden, tables, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, tables)
        if self.head is None:
            return hidden
        loss = cast(Tensor, self.head(hidden, shard(labels, self.cp)))
        for depth, block in enumerate(self.mtp, start=1):
            embed = self.mtp_embedding or self.embedding
            assert embed is not None
            next_tokens, next_labels = (shard(sequence.roll(-depth, 0), self.cp) for sequence in (tokens, labels))
            hidden = block(hidden, embed(next_tokens), tables)
            loss = loss + MTP_LOSS_WEIGHT / len(self.mtp) * self.head(hidden, next_labels)
        return loss


def initialise(module: nn.Module, seed: int) -> None:
    """Fill a module: norms around 1, all else normal with INITIAL_STD; each parameter by seed and its name alone.

    If a parameter is sharded, the rows of all ranks get the same values.
    """
    for name, parameter in module.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(
            crc32(f"{seed} {whole_name(name, parameter)}".encode())
        )
        with torch.no_grad():
            values = local(parameter).normal_(0.0, INITIAL_STD, generator=generator)
            if "norm" in name and name.endswith("weight"):
                values.add_(1.0)


def local(tensor: Any) -> Tensor:
    """This rank's rows of a tensor that may be sharded, or the whole tensor."""
    return cast(Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else cast(Tensor, tensor)


def whole_name(name: str, parameter: Tensor) -> str:
    """The name of a parameter in the whole model. Replicas share one name."""
    return marks_of(parameter).replica or name


def copy_shard(whole: nn.Module, shard: nn.Module, around: Surroundings) -> None:
    """Fill `shard` with its rank's part of the parameters of `whole`, the same module built without peers."""
    whole_parameters = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in shard.named_parameters():
            parameter.copy_(shard_of(whole_parameters[name], parameter, around))


def shard_of(whole: Tensor, like: Tensor, around: Surroundings) -> Tensor:
    """The part of a whole parameter (or of its gradient) that `like` is; key-value heads fewer than tp repeat."""
    marks = marks_of(like)
    if marks.shard is not None:
        dim, sections = marks.shard
        parts = torch.split(whole, [width for width, _ in sections], dim=dim)
        pieces = [
            part.narrow(dim, around.tp.rank * (width // local) // around.tp.size * local, local)
            for part, (width, local) in zip(parts, sections, strict=True)
        ]
        return torch.cat(pieces, dim=dim)
    return whole.narrow(0, around.ep.rank * len(like), len(like)) if marks.expert else whole
