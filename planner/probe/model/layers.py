"""The probe's model in eager torch: decoder layer, embedding, head, multi-token prediction.

Activations are [seq/tp, batch, hidden]; where cp splits sequences, seq is this rank's share of one. What these modules
keep for backward is what the operator lists of the `torch-eager` runtime say; tests hold the two against each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.probe.model.attention import Attention, LatentAttention
from planner.probe.model.attention_tables import AttentionTables
from planner.probe.model.linear import Linear
from planner.probe.model.marks import mark_partial, mark_shard
from planner.probe.model.mlp import DenseMLP, MoE
from planner.probe.model.norm import Norm
from planner.probe.model.peer_functions import HiddenToSequence, Leave, LeaveByView
from planner.probe.model.peers import apply
from planner.probe.model.split_sequence import shard
from planner.probe.model.surroundings import Surroundings, recomputable, to_fp32
from planner.specs.model import LayerKind, ModelSpec


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with a norm behind each half where the model has post norms."""

    def __init__(self, model: ModelSpec, kind: LayerKind, around: Surroundings) -> None:
        super().__init__()
        self.around, self.mlp_name = around, "moe" if kind.mlp == "moe" else "mlp"
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
        mark_shard(self.weight, 0, ((model.vocab_size, self.rows),))
        learned = model.position_embedding == "learned"
        positions = torch.empty(model.max_position_embeddings or 0, model.hidden_size)
        self.positions = nn.Parameter(positions) if learned else None
        mark_partial(self.positions)
        self.norm = Norm(model.hidden_size, model) if model.embedding_norm else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [seq, batch] → [seq/tp, batch, hidden]."""
        tp = self.around.tp
        if tp.size == 1:
            x = functional.embedding(tokens, self.weight)
        else:
            local = tokens - tp.rank * self.rows
            inside = (local >= 0) & (local < self.rows)
            x = functional.embedding(local.where(inside, 0), self.weight).where(inside.unsqueeze(-1), 0)
            x = apply(LeaveByView if tp.sequence_parallel else Leave, x, tp)
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
        x = x if self.tp.size == 1 else apply(HiddenToSequence, x, self.tp)
        out: Tensor = self.layer(x, tables)
        return out
