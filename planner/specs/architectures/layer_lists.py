"""Layers that slide, attend to everything, scan or have experts, as configs list them or an architecture's rule says.

A list of layers becomes the shortest that repeats to it, or, where layers slide but every n-th, that n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from planner.specs.architectures.derivations import (
    MAX_LAYERS,
    Config,
    Derived,
    InexpressibleError,
    first_of,
    list_in,
    num_layers,
    sum_of,
    whole,
)
from planner.specs.expressions import names_in, value_of
from planner.specs.model_parts import NEEDS
from planner.specs.reading import kind_of

IsOne = Callable[[Config, int], bool]

ATTENTIONS = {
    "full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked", "hybrid": "full",
    "hybrid_sliding": "sliding",
}  # fmt: skip
"""Names of transformers for the ways to attend."""
STATE_NAMES = ("linear_attention", "mamba", "mamba2", "M", "recurrent")
"""Names of layers with a state, by which transformers 5 and configs before it call them."""


def shortest(listed: Sequence[str]) -> tuple[str, ...]:
    """The shortest beginning of `listed` that repeats to all of it."""
    size = len(listed)
    for period in range(1, size):
        if all(listed[i] == listed[i - period] for i in range(period, size)):
            return tuple(listed[:period])
    return tuple(listed)


def listed(config: Config, names: dict[str, str], key: str = "layer_types") -> list[str] | None:
    """The kinds of layers that the config lists under `key`, in our `names`; None where it lists none."""
    types = config.get(key)
    if types is None:
        return None
    if not isinstance(types, list):
        raise InexpressibleError(f"{key}: {types!r:.60} is {kind_of(types)}, expected a list")
    for kind in types:
        if not isinstance(kind, str) or kind not in names:
            raise InexpressibleError(f"{key}: {kind!r:.60} is none of {', '.join(names)}")
    if len(types) != config.get("num_hidden_layers"):
        raise InexpressibleError(f"{key}: {len(types)} entries for {config.get('num_hidden_layers')} layers")
    return [names[kind] for kind in types[:MAX_LAYERS]]


def window(is_full: IsOne, key: str = "sliding_window") -> Callable[[Config], Derived]:
    """A function that finds the layers which slide (or attend in chunks), by `layer_types` or the architecture's rule.

    The width of the window, or of a chunk, stands under `key`.
    """
    narrow = "sliding" if key == "sliding_window" else "chunked"

    def derive(config: Config) -> Derived:
        span, types = config.get(key) or config.get(f"{key}_size"), listed(config, ATTENTIONS)
        if not span:
            return {}
        if types is None:
            full = [is_full(config, layer) for layer in range(num_layers(config))]
        else:
            full = [kind == "full" for kind in types]
        if full and all(full):
            return {}
        pattern = full.index(True) + 1 if True in full else None
        if pattern is None or full == [(layer + 1) % pattern == 0 for layer in range(len(full))]:
            return {key: span, "sliding_window_pattern": pattern, "layer_types": None}
        kinds = shortest(["full" if is_one else narrow for is_one in full])
        return {key: span, "sliding_window_pattern": None, "layer_types": kinds}

    return derive


def mixers(kind: str, is_full: IsOne) -> Callable[[Config], Derived]:
    """A function that says of each layer whether it mixes by `kind`, full attention, or attention to chosen keys."""
    names = ATTENTIONS | {"attention": "full", "indexed_attention": "indexed"}
    names |= dict.fromkeys((*STATE_NAMES, kind), kind)

    def derive(config: Config) -> Derived:
        types = listed(config, names) or listed(config, names, "layers_block_type")
        if types is None:
            types = ["full" if is_full(config, layer) else kind for layer in range(num_layers(config))]
        return {"layer_types": shortest(types)} if types else {}

    return derive


def without_unused_sections(fields: Derived) -> Derived:
    """`fields` less the sections of mixers that no layer has, as Granite 4's models without Mamba give them."""
    used = {NEEDS.get(kind) for kind in fields.get("layer_types") or ()}
    unused = {name for name in ("mamba", "linear_attention", "indexer", "short_conv_kernel") if name not in used}
    return {name: value for name, value in fields.items() if name not in unused}


def where(rule: str) -> IsOne:
    """Layers for whose number, `layer`, and whole numbers of the config a rule holds."""

    def holds(config: Config, layer: int) -> bool:
        names = {name: whole(config, name) for name in names_in(rule) - {"layer"}}
        return bool(value_of(rule, names | {"layer": layer}))

    return holds


never = where("False")
"""No layer is one."""


def every(key: str, default: int) -> IsOne:
    """Every n-th layer attends to everything, or has experts: n given under `key`, or as a text like LLLG."""

    def is_nth(config: Config, layer: int) -> bool:
        stated = config.get(key)
        if isinstance(stated, str) and stated and set(stated) <= {"L", "G"}:
            return stated[layer % len(stated)] == "G"
        period = whole(config, key, config.get(f"_{key}", default))
        return period > 0 and (layer + 1) % period == 0

    return is_nth


def among(key: str, other: IsOne = never, first: int = 0) -> IsOne:
    """Layers whose numbers, from `first` on, are listed under a key; `other` where none are listed."""

    def is_listed(config: Config, layer: int) -> bool:
        stated = config.get(key)
        return layer + first in stated if isinstance(stated, list) else other(config, layer)

    return is_listed


def unrotated(config: Config, layer: int) -> bool:
    """Layers without rotary embeddings attend to everything, every fourth one where no others are listed (Llama 4)."""
    rotates = config.get("no_rope_layers")
    if isinstance(rotates, list) and len(rotates) == config.get("num_hidden_layers"):
        return not rotates[layer]
    return every("no_rope_layer_interval", 4)(config, layer)


def qwen_full(config: Config, layer: int) -> bool:
    """Layers from max_window_layers on slide, and none does unless use_sliding_window says so."""
    first = config.get("max_window_layers")
    return not config.get("use_sliding_window") or not isinstance(first, int) or layer < first


def gemma4_full(config: Config, layer: int) -> bool:
    """Every sixth layer, and the last."""
    return every("sliding_window_pattern", 6)(config, layer) or layer == num_layers(config) - 1


def marked(key: str, mark: int, other: IsOne) -> Callable[[Config, int], bool]:
    """Layers for which a list under `key` has the `mark`; `other` where there is no such list."""

    def is_marked(config: Config, layer: int) -> bool:
        stated = config.get(key)
        is_listed = isinstance(stated, list) and len(stated) == config.get("num_hidden_layers")
        return stated[layer] == mark if is_listed else other(config, layer)  # type: ignore[index]

    return is_marked


def local_or_global(config: Config) -> Derived:
    """GPT-Neo's attention_types: lists of global and local, each with the number of times it repeats."""
    names = {"global": "full", "local": "sliding"}
    try:
        kinds = [names[kind] for group, times in config["attention_types"] for kind in list(group) * times]
    except (KeyError, TypeError, ValueError):
        raise InexpressibleError(
            f"attention_types: {config.get('attention_types')!r:.60} is no list of pairs"
        ) from None
    if len(kinds) != config.get("num_layers"):
        raise InexpressibleError(f"attention_types: {len(kinds)} entries for {config.get('num_layers')} layers")
    slides = "sliding" in kinds
    return {"layer_types": shortest(kinds), "sliding_window": config.get("window_size")} if slides else {}


def block_pattern(config: Config) -> Derived:
    """Nemotron-H's layers, each a mixer or an MLP alone: M, *, - and E in one text, or a list of names."""
    given = config.get("hybrid_override_pattern")
    if isinstance(given, str):
        blocks = [_BLOCKS.get(mark, mark) for mark in given if mark != "|"]
    else:
        stated = first_of(config, ("layers_block_type", "layer_types"))
        if not isinstance(stated, list):
            raise InexpressibleError(f"hybrid_override_pattern: {given!r:.60} is {kind_of(given)}, expected text")
        blocks = stated
    for block in blocks:
        if block not in _HALVES:
            raise InexpressibleError(f"hybrid_override_pattern: {block!r:.60} is none of {', '.join(_BLOCKS)}")
    predicted = config.get("mtp_hybrid_override_pattern")
    if predicted not in (None, "", "*E", "*-"):
        raise InexpressibleError(f"mtp_hybrid_override_pattern: {predicted!r:.60}, expected *E or *-")
    pairs = [_HALVES[block] for block in blocks[:MAX_LAYERS]]
    return {
        "num_hidden_layers": len(blocks),
        "layer_types": shortest([mixer for mixer, _ in pairs]),
        "mlp_layer_types": shortest([mlp for _, mlp in pairs]),
    }


_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_HALVES = {
    **dict.fromkeys(("mamba", "linear_attention"), ("mamba2", "none")),
    **dict.fromkeys(("attention", "full_attention"), ("full", "none")),
    "mlp": ("none", "dense"),
    "moe": ("none", "moe"),
}


def moe_layers(is_moe: IsOne) -> Callable[[Config], Derived]:
    """A function that writes the layers with experts as first_k_dense_replace and moe_layer_freq, or lists them all."""

    def derive(config: Config) -> Derived:
        types = listed(config, {"dense": "dense", "sparse": "moe", "moe": "moe"}, "mlp_layer_types")
        if types is None:
            types = ["moe" if is_moe(config, layer) else "dense" for layer in range(num_layers(config))]
        layers = [layer for layer, kind in enumerate(types) if kind == "moe"]
        if not layers:
            return {"first_k_dense_replace": num_layers(config)}
        freq = layers[1] - layers[0] if len(layers) > 1 else 1
        first = layers[0] - freq + 1
        if first < 0 or layers != list(range(layers[0], num_layers(config), freq)):
            return {"mlp_layer_types": shortest(types)}
        return {"first_k_dense_replace": first, "moe_layer_freq": freq}

    return derive


def qwen_moe(config: Config, layer: int) -> bool:
    return every("decoder_sparse_step", 0)(config, layer) and layer not in list_in(config, "mlp_only_layers")


def deepseek_moe(config: Config, layer: int) -> bool:
    """Every n-th layer from first_k_dense_replace on has experts, or those for which moe_layer_freq lists a 1."""
    freq = config.get("moe_layer_freq")
    if isinstance(freq, list) and len(freq) == config.get("num_hidden_layers"):
        chosen = bool(freq[layer])
    else:
        step = whole(config, "moe_layer_freq", 1)
        chosen = step > 0 and layer % step == 0
    return chosen and layer >= whole(config, "first_k_dense_replace", 0)


def index_layers(config: Config) -> Derived:
    """Layers of sparse attention choose their keys, unless indexer_types says that they share an earlier choice."""
    kinds = listed(config, {"full": "indexed", "shared": "sparse"}, "indexer_types")
    if kinds and kinds[0] == "sparse":
        raise InexpressibleError("indexer_types: the first layer shares a choice of keys that none has made")
    return {"layer_types": shortest(kinds) if kinds else ("indexed",)}


def hy_v4_layers(config: Config) -> Derived:
    """The first layer and every fourth of the others choose keys, unless they are listed (Hunyuan 4)."""
    if config.get("indexer_types") is not None:
        return index_layers(config)
    chosen = ["indexed" if not layer or layer % 4 == 1 else "sparse" for layer in range(num_layers(config))]
    return {"layer_types": shortest(chosen)}


def full_unrotated(config: Config) -> Derived:
    """Layers that do not slide, every n-th, have no rotary positions (Command R7B, EXAONE 4, Trinity)."""
    found = window(every("sliding_window_pattern", 4))(config)
    return {"no_rope_layer_interval": found.get("sliding_window_pattern")}


def windows_but(config: Config, layer: int) -> bool:
    """Layers that are not listed under local_layer_ids, every sixth where none are listed (Inkling)."""
    stated = config.get("local_layer_ids")
    return layer not in stated if isinstance(stated, list) else (layer + 1) % 6 == 0


def rotated_layers(config: Config) -> Derived:
    """Every n-th layer has no rotary positions (SmolLM3): n as stated, or as no_rope_layers lists it."""
    stated, count = config.get("no_rope_layers"), num_layers(config)
    if not isinstance(stated, list) or len(stated) != count:
        return {"no_rope_layer_interval": whole(config, "no_rope_layer_interval", 4) or None}
    if 0 not in stated:
        return {}
    interval = stated.index(0) + 1
    if stated != [int((layer + 1) % interval != 0) for layer in range(count)]:
        raise InexpressibleError("no_rope_layers: layers without rotary positions that are not every n-th")
    return {"no_rope_layer_interval": interval}


def mllama_layers(config: Config) -> Derived:
    """Llama 3.2 Vision's listed layers attend to images, through two gates of one number each."""
    stated = list_in(config, "cross_attention_layers")
    crosses = [layer in stated for layer in range(num_layers(config))]
    sizes = tuple({"vector_parameters": 2} if one else {} for one in crosses)
    return {"layer_types": shortest(["cross" if one else "full" for one in crosses]), "layer_sizes": sizes}


def iquest_layers(config: Config) -> Derived:
    """IQuest-Q1's layers: a few first ones, a block of kinds that repeats, a few last ones."""
    first, block, last = (
        config.get(name) for name in ("first_layers_types", "hybrid_layers_types_block", "last_layers_types")
    )
    if not (isinstance(first, list) and isinstance(block, list) and isinstance(last, list)):
        raise InexpressibleError("first_layers_types, hybrid_layers_types_block, last_layers_types: expected lists")
    types = [*first, *block * min(whole(config, "num_hybrid_layers_block"), MAX_LAYERS), *last]
    return window(never)({**config, "layer_types": types})


def looped(key: str, default: int, first: str = "0", last: str = "num_hidden_layers") -> Callable[[Config], Derived]:
    """A function that writes layers again for each further time that they run, which stands under a key.

    They are those from one sum of sizes to another; kinds of layers that a config lists are listed again, too.
    """

    def derive(config: Config) -> Derived:
        layers, times = num_layers(config), whole(config, key, default)
        start, end = (min(max(sum_of(text, partial(whole, config)), 0), layers) for text in (first, last))
        if not 0 < times * layers <= MAX_LAYERS:
            raise InexpressibleError(f"{key}: {times}, and {layers} layers")
        order = [*range(end), *list(range(start, end)) * (times - 1), *range(end, layers)]
        fields: Derived = {"num_hidden_layers": len(order)}
        if len(order) > layers:
            again = ({"shares_weights": True},) * (len(order) - layers)
            fields["layer_sizes"] = ({},) * end + again + ({},) * (layers - end)
        if start or end < layers:
            types = listed(config, ATTENTIONS) or []
            fields |= {"layer_types": shortest([types[layer] for layer in order]), "sliding_window_pattern": None}
        return fields

    return derive


def dory(config: Config) -> Derived:
    """Dory's layers, those between the first and the last few more than once; a config may list halves of layers."""
    types = config.get("layer_types")
    if isinstance(types, list) and "mlp" in types:
        halved = ("num_hidden_layers", "n_input_layers", "n_output_layers")
        config = {**config, "layer_types": types[::2], **{name: whole(config, name) // 2 for name in halved}}
    elif types is None:
        turns = ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(num_layers(config))]
        config = {**config, "layer_types": turns}
    return looped("n_recurrent_loops", 2, "n_input_layers", "num_hidden_layers - n_output_layers")(config)


def repeated(key: str, names: dict[str, str]) -> Callable[[Config], Derived]:
    """A function that reads kinds of layers, which repeat."""

    def derive(config: Config) -> Derived:
        whole_list = {**config, "num_hidden_layers": len(list_in(config, key))}
        return {"layer_types": tuple(listed(whole_list, names, key) or ())[: num_layers(config)] or None}

    return derive


def shared_blocks(scan: str, shared: str, is_shared: IsOne) -> Callable[[Config], Derived]:
    """A function that lists Zamba's layers: all scan, and some of them behind one of a few blocks, which take turns."""
    names = {"mamba": scan, "linear_attention": scan, "hybrid": shared}

    def derive(config: Config) -> Derived:
        kinds = listed(config, names, "layers_block_type") or listed(config, names)
        kinds = kinds or [shared if is_shared(config, layer) else scan for layer in range(num_layers(config))]
        once, seen, sizes = whole(config, "num_mem_blocks", 1), 0, list[Derived]()
        for kind in kinds:
            sizes.append({"shares_weights": True} if kind == shared and seen >= once else {})
            seen += kind == shared
        return {"layer_types": shortest(kinds), "layer_sizes": tuple(sizes)}

    return derive


def turns(kinds: list[str], first: list[str] | None = None) -> Callable[[Config], Derived]:
    """A function that lists kinds which take turns, behind a few first ones, where a config lists none."""

    def derive(config: Config) -> Derived:
        before = first or []
        behind = [kinds[layer % len(kinds)] for layer in range(len(before), num_layers(config))]
        return {} if config.get("layer_types") else {"layer_types": shortest([*before, *behind])}

    return derive


def jamba_moe(config: Config) -> Derived:
    """Jamba's experts, of which a model with one has none."""
    if config.get("num_experts") == 1:
        return {"moe": None}
    return moe_layers(where("expert_layer_period > 0 and layer % expert_layer_period == expert_layer_offset"))(config)
