"""The options of Megatron-LM that say a model: how each is written, and read with Megatron's defaults."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise

from planner.errors import SpecError
from planner.export.megatron.option_rows import (
    READERS,
    Codec,
    Options,
    given,
    layer_flags,
    of_model,
    read_fields,
    reading,
    sections_of,
    size,
    table,
    text,
)
from planner.export.named_models import Model, vocabulary_of
from planner.export.run_settings import listed, stated
from planner.export.trainer_files import Arguments
from planner.specs.architectures.derivations import InexpressibleError
from planner.specs.architectures.layer_lists import block_pattern, shortest
from planner.specs.base import Fields, Said
from planner.specs.expressions import value_of
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.specs.units import is_count
from planner.trainers.rules.facts import HYBRID_LETTERS, every_nth, is_hybrid, rotary_method

_POSITIONS = {
    "learned_absolute": "learned", "rope": "rope", "yarn": "rope", "mrope": "rope", "alibi": "alibi", "none": "none",
}  # fmt: skip


def _width(options: Options) -> int:
    """Width of a dense MLP: 4·hidden unless told; two thirds of that, in multiples of 64, for SwiGLU."""
    hidden = size(options, "--hidden-size")
    unasked = int((4 * hidden * 2 / 3) / 64) * 64 if "--swiglu" in options else 4 * hidden
    return given(options, "--ffn-hidden-size", unasked)


def _write_windows(model: ModelSpec) -> Arguments:
    """The window, and the layers that have none: every n-th, or those that a list of all layers says."""
    slides = [kind.attention == "sliding" for kind in model.layers]
    if model.sliding_window is None or not any(slides):
        return {}
    # (left, right) keys beside the query's own
    arguments: Arguments = {"--window-size": f"({model.sliding_window - 1},0)"}
    if not all(slides):
        arguments["--window-attn-skip-freq"] = every_nth([not slide for slide in slides]) or listed(slides)
    return arguments


def _read_windows(options: Options) -> Fields:
    """The window, and the layers that have it: all, all but every n-th, or as a list says."""
    numbers = re.findall(r"\d+", text(options, "--window-size"))
    if not numbers:
        return {}
    pattern, window = text(options, "--window-attn-skip-freq").strip(), {"sliding_window": int(numbers[0]) + 1}
    if not pattern or is_count(pattern):
        return {**window, "sliding_window_pattern": int(pattern) if pattern else None}
    slides = layer_flags("--window-attn-skip-freq", pattern, size(options, "--num-layers"))
    if n := every_nth([not slide for slide in slides]):
        return {**window, "sliding_window_pattern": n}
    return {**window, "layer_types": ["sliding" if slide else "full" for slide in slides]}


def _write_positions(model: ModelSpec) -> Arguments:
    """The kind of positions; yarn is one of its own where attention is not latent."""
    if model.position_embedding == "rope" and rotary_method(model) == "yarn" and model.mla is None:
        return {"--position-embedding-type": "yarn"}
    kind: str = model.position_embedding
    return {"--position-embedding-type": "learned_absolute" if kind == "learned" else kind}


def _kind_of_positions(options: Options) -> str:
    kind = text(options, "--position-embedding-type", "learned_absolute")
    if "--use-rotary-position-embeddings" in options:
        return "rope"
    return "none" if "--no-position-embedding" in options and kind == "learned_absolute" else kind


def _read_positions(options: Options) -> Fields:
    kind = _kind_of_positions(options)
    if kind not in _POSITIONS:
        raise SpecError(f"--position-embedding-type: {kind[:60]!r} is unknown", f"one of {', '.join(_POSITIONS)}")
    if _POSITIONS[kind] != "learned":
        return {"position_embedding": _POSITIONS[kind]}
    rows = "--max-position-embeddings" if "--max-position-embeddings" in options else "--seq-length"
    return {"position_embedding": "learned", "max_position_embeddings": size(options, rows)}


def _write_unrotated(model: ModelSpec) -> int | str | None:
    """Every n-th layer without rotary positions; as a list where n does not divide the layers."""
    n, layers = model.no_rope_layer_interval, model.num_hidden_layers
    if n is None or n > layers:
        return None
    return n if layers % n == 0 else listed((i + 1) % n == 0 for i in range(layers))


def _read_unrotated(options: Options) -> Fields:
    pattern = text(options, "--no-rope-freq").strip()
    if not pattern or is_count(pattern):
        return {"no_rope_layer_interval": int(pattern) if pattern else None}
    n = every_nth(layer_flags("--no-rope-freq", pattern, size(options, "--num-layers")))
    if n is None:
        raise SpecError(f"--no-rope-freq: {pattern[:60]!r} has no counterpart here", "every n-th layer is unrotated")
    return {"no_rope_layer_interval": n}


def _vocabulary(options: Options) -> int | None:
    """Size of the vocabulary; None where only the tokenizer knows it."""
    if "--padded-vocab-size" in options:
        return size(options, "--padded-vocab-size")
    tokenizer = text(options, "--tokenizer-model") or text(options, "--tokenizer-name-or-path")
    return vocabulary_of(text(options, "--tokenizer-type", "GPT2BPETokenizer"), tokenizer)


VARIANTS = ("gated_delta_net", "gdn")
"""Core's names of gated delta nets; it knows the first since 0.16, and from 0.20 on as an older name."""


def _write_delta(model: ModelSpec) -> Arguments:
    nets = [kind.attention == "gated_delta" for kind in model.layers]
    every = every_nth([not net for net in nets])
    return {"--experimental-attention-variant": VARIANTS[0], "--linear-attention-freq": every or listed(nets)}


def _read_delta(options: Options) -> Fields:
    """The layers that are gated delta nets, or that choose the keys they attend to."""
    if (variant := text(options, "--experimental-attention-variant")) == "dsa":
        return {"layer_types": ["indexed"]}
    if variant not in VARIANTS:
        raise SpecError(f"--experimental-attention-variant: {variant[:60]} is not modelled", "leave it out")
    pattern, num_layers = text(options, "--linear-attention-freq").strip(), size(options, "--num-layers")
    if is_count(pattern) and int(pattern):
        nets = [layer % int(pattern) != int(pattern) - 1 for layer in range(num_layers)]
    else:
        nets = layer_flags("--linear-attention-freq", pattern, num_layers)
    return {"layer_types": shortest(["gated_delta" if net else "full" for net in nets])}


def _scan_heads(options: Options) -> int:
    """Heads of a scan: those of twice the width unless told."""
    unasked = 2 * size(options, "--hidden-size") // given(options, "--mamba-head-dim", 64)
    return given(options, "--mamba-num-heads", unasked)


def _have_experts(options: Options) -> list[bool]:
    """True for each layer that has experts: every n-th from the first on, or as a list says."""
    pattern, num_layers = text(options, "--moe-layer-freq", "1").strip(), size(options, "--num-layers")
    if is_count(pattern) and int(pattern):
        return [layer % int(pattern) == 0 for layer in range(num_layers)]
    return layer_flags("--moe-layer-freq", pattern, num_layers)


def _read_expert_layers(options: Options) -> Fields:
    """Fields that say which layers have experts: the first k have none, then every n-th has; else each one's kind."""
    flags = _have_experts(options)
    first = flags.index(True) if True in flags else len(flags)
    for every in range(1, first + 2):
        dense = first + 1 - every
        if flags == [i >= dense and (i - dense + 1) % every == 0 for i in range(len(flags))]:
            return {"moe.first_k_dense_replace": dense, "moe.moe_layer_freq": every}
    return {"mlp_layer_types": ["moe" if experts else "dense" for experts in flags]}


def _write_expert_layers(model: ModelSpec) -> str:
    flags = [kind.mlp == "moe" for kind in model.layers]
    return "1" if all(flags) else listed(flags)


def _plain(said: str, default: float | None) -> float | None:
    """A number without a sign or an exponent; the default where nothing, or no such number, is given."""
    return float(said) if re.fullmatch(r"\d+\.?\d*|\.\d+", said) else default


CODECS = {
    "windows": Codec(_write_windows, _read_windows),
    "positions": Codec(_write_positions, _read_positions),
    "unrotated": Codec(_write_unrotated, _read_unrotated),
    "delta": Codec(_write_delta, _read_delta),
    "expert_layers": Codec(_write_expert_layers, _read_expert_layers),
}
_SECTIONS = sections_of("model", CODECS)
MODEL_OPTIONS = frozenset[str]().union(*(section.names_read() for section in _SECTIONS.values()))
"""Options that are read for a model."""


def model_arguments(model: ModelSpec, seq_length: int, vocab_divisible_by: int, dropout: bool = False) -> Arguments:
    """All arguments that decide the model's parameters, their shapes, its forward and its losses."""
    model = stated(model)
    learned = model.position_embedding == "learned"
    names = {**of_model(model), "is_hybrid": is_hybrid}
    said = {name: section.written(model) for name, section in _SECTIONS.items() if _is_present(name, "write", names)}
    return {
        **said["attention"],
        **said.get("latent", {}),
        **said["heads"],
        **said.get("delta", {}),
        **({"--hybrid-layer-pattern": hybrid_pattern(model), **said["scan"]} if is_hybrid(model) else {}),
        # a table of learned positions has the model's rows
        "--max-position-embeddings": (model.max_position_embeddings or 0) if learned else seq_length,
        **said.get("rotary", {}),
        **said["vocabulary"],
        "--make-vocab-size-divisible-by": vocab_divisible_by,
        **said["layers"],
        **said.get("experts", {}),
        **said["further_tokens"],
        **({} if dropout else {"--attention-dropout": 0.0, "--hidden-dropout": 0.0}),
    }


def _is_present(section: str, way: str, names: Said) -> bool:
    """A section stands, as a model is written or options are read."""
    row = table()["present"].get(section)
    return row is None or bool(value_of(row[way], names))


_SIZES = {row.name: row.count for section in _SECTIONS.values() for row in section.rows if row.count} | {
    "--ffn-hidden-size": "intermediate_size",
    "--num-query-groups": "num_key_value_heads",
}


def resized(named: Model, options: Options) -> Model:
    """A model by name, or its fields where options give it other sizes."""
    if not isinstance(named, str) or _SIZES.keys().isdisjoint(options):
        return named
    fields: Fields = load_model(named).model_dump(mode="json")
    own = deepcopy(fields)
    if fields["layer_sizes"]:
        return named
    for option, path in _SIZES.items():
        part, _, name = path.rpartition(".")
        owner = fields[part] if part else fields
        # heads of latent attention have sizes of their own
        is_own = owner and owner[name] is not None and not (name == "head_dim" and fields["mla"])
        if is_own and is_count(number := text(options, option)):
            owner[name] = int(number)
    for name in ("layer_types", "mlp_layer_types"):
        fields[name] = fields[name] and fields[name][: fields["num_hidden_layers"]]
    return named if fields == own else {**fields, "name": f"{named}-resized"}


PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")


def hybrid_pattern(model: ModelSpec, ends: Sequence[int] = ()) -> str:
    """A letter for each layer, | where a virtual stage ends, and those of each further token: `ME|M*/*E`."""
    letters, predicted = (
        "".join(HYBRID_LETTERS[kind.attention, kind.mlp] for kind in kinds)
        for kinds in (model.layers, model.predicting_layers)
    )
    bounds = [0, *ends] if ends else [0, len(letters)]
    main = "|".join(letters[first:last] for first, last in pairwise(bounds))
    return main + f"/{predicted}" * model.num_nextn_predict_layers


def _pattern(options: Options) -> list[str]:
    """Letters of a hybrid's layers, with bars between stages, then those of each prediction; [""] for no hybrid."""
    return next((text(options, name) for name in PATTERNS if name in options), "").strip("\"'").split("/")


def with_pattern(options: Options) -> Options:
    """The options with the layers, stages and predictions that a hybrid's pattern says."""
    main, *predicted = _pattern(options)
    if not main:
        return options
    stages = main.split("|")
    said = {"--num-layers": [str(sum(map(len, stages)))]}
    if len(stages) > 1:
        letters = "|".join("t" * len(stage) for stage in stages)
        said["--pipeline-model-parallel-layout"] = [f"E{letters}{'m' * len(predicted)}L"]
    return {**options, **said, **({"--mtp-num-layers": [str(len(predicted))]} if predicted else {})}


def _hybrid(options: Options, fields: Fields) -> Fields:
    """The layers of a hybrid, each a mixer or an MLP alone, in place of those that other options say."""
    main, *predicted = _pattern(options)
    if not main:
        return {}
    config = {"hybrid_override_pattern": main, "mtp_hybrid_override_pattern": predicted[0] if predicted else None}
    try:
        found: Fields = dict(block_pattern(config))
    except InexpressibleError as error:
        raise SpecError(str(error), "give a pattern of M, *, - and E") from None
    moe = fields.get("moe") if "E" in main else None
    found["moe"] = moe and {**moe, "moe_layer_freq": 1, "first_k_dense_replace": 0}
    return {**found, "intermediate_size": _width(options) if "-" in main else None}


def read_model(options: Options) -> Fields:
    """Fields of a ModelSpec. Raises SpecError where a size is missing or is no number."""
    names = reading(options)
    sections = [section for name, section in _SECTIONS.items() if _is_present(name, "reads", names)]
    fields = read_fields(sections, options)
    return {"name": "imported", **fields, **_hybrid(options, fields)}


READERS |= {
    "width": _width,  # experts are as wide as a dense MLP unless told
    "have_experts": _have_experts,
    "plain": _plain,
    "scan_heads": _scan_heads,
    "vocabulary": _vocabulary,
    "positions": _kind_of_positions,
    "is_rotary": lambda options: _POSITIONS.get(_kind_of_positions(options)) == "rope",
    "pattern": _pattern,
}
