"""One virtual stage as a module: its part of the model, from tokens or hidden states to hidden states or the loss."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.probe.model.attention_tables import AttentionTables
from planner.probe.model.layers import DecoderLayer, Embedding, Head, MTPBlock
from planner.probe.model.marks import mark_replica
from planner.probe.model.split_sequence import shard
from planner.probe.model.surroundings import Surroundings
from planner.probe.run import ChunkSpec
from planner.specs.model import ModelSpec

MTP_LOSS_WEIGHT = 0.3
"""DeepSeek-V3 §4.2: weight of the multi-token-prediction loss for most of its training."""


class Chunk(nn.Module):
    """Embedding, decoder layers, multi-token prediction and head, of those that the virtual stage holds.

    Parameters are named by their place in the whole model, so that the same name means the same values on any rank.
    """

    def __init__(self, model: ModelSpec, spec: ChunkSpec, around: Surroundings) -> None:
        super().__init__()
        self.spec, self.model, self.cp = spec, model, around.cp
        self.embedding = Embedding(model, around) if spec.embedding else None
        self.layers = nn.ModuleDict(
            {str(i): DecoderLayer(model, model.layers[i], around) for i in range(spec.first_layer, spec.last_layer)}
        )
        self.head = Head(model, around) if spec.head else None
        self.mtp = nn.ModuleList()
        if spec.mtp:
            self.mtp.extend(MTPBlock(model, around) for _ in range(model.num_nextn_predict_layers))
        # the embedding of the next tokens: this chunk's own, or a replica kept equal to the first stage's
        self.mtp_embedding = Embedding(model, around) if spec.mtp and not spec.embedding else None
        if model.tie_word_embeddings and self.head is not None:
            if self.embedding is not None:
                self.head.output.weight = self.embedding.weight
            mark_replica(self.head.output.weight, "embedding.weight")
        if self.embedding is not None:
            mark_replica(self.embedding.weight, "embedding.weight")
        if self.mtp_embedding is not None:
            for name, parameter in self.mtp_embedding.named_parameters():
                mark_replica(parameter, f"embedding.{name}")

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


def hidden_shape(model: ModelSpec, seq_length: int, batch: int, around: Surroundings) -> tuple[int, int, int]:
    """Shape of what stages exchange: [seq/tp, batch, hidden] under sequence parallelism, else [seq, batch, hidden].

    `seq_length` is what the rank holds of a sequence.
    """
    tp = around.tp.size if around.tp.sequence_parallel else 1
    return seq_length // tp, batch, model.hidden_size
