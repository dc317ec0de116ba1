"""A Hugging Face `config.json` as a ModelSpec: no transformers and no network.

A row of `rows.yaml` says for each `model_type` the config key of each field, the values that transformers assumes for
absent keys, the fields that are the same for every model of the architecture, and the names of the functions that work
out the others (`derivations`, `layer_lists`, `sections`). What all configs say alike is read here.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from planner.errors import SpecError
from planner.specs.architectures import derivations, layer_lists, sections
from planner.specs.architectures.derivations import (
    Config,
    Derived,
    InexpressibleError,
    check_switches,
    first_of,
    mapping_in,
)
from planner.specs.architectures.layer_lists import without_unused_sections
from planner.specs.base import filled
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MLASpec, MoESpec
from planner.specs.problems import nearest, spec_error
from planner.specs.reading import kind_of, load_yaml

_log = logging.getLogger(__name__)
Keys = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The spelling of a ModelSpec under one `model_type`."""

    keys: Keys
    """The config keys that may hold each of our fields, first choice first."""
    defaults: dict[str, Any]
    """The values that transformers assumes, by config key."""
    derive: tuple[Callable[[Config], Derived], ...]
    fixed: dict[str, Any]
    sections: tuple[str, ...]
    """Keys under which a mapping holds further keys of the config."""


def _alike(*names: str) -> Keys:
    return {name: (name,) for name in names}


_BLOCK = _alike(
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "tie_word_embeddings", "rope_theta", "partial_rotary_factor",
)  # fmt: skip
_DENSE = _BLOCK | _alike("intermediate_size")
_MOE = _alike("num_experts_per_tok", "moe_intermediate_size") | {"num_experts": ("num_experts", "num_local_experts")}
_MLA = _alike("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK = {name: keys for name, keys in _DENSE.items() if name != "head_dim"} | _MLA | _MOE
_DEEPSEEK |= _alike("num_nextn_predict_layers") | {"head_dim": ("v_head_dim",)}
_DEEPSEEK["num_experts"] = ("n_routed_experts", "num_local_experts", "num_experts")
_GPT = _alike("vocab_size", "tie_word_embeddings")
_GPT |= {"num_hidden_layers": ("n_layer", "num_hidden_layers"), "hidden_size": ("n_embd", "hidden_size", "n_embed"),
         "num_attention_heads": ("n_head", "num_attention_heads")}  # fmt: skip
GROUPS = {
    "BLOCK": _BLOCK, "DENSE": _DENSE, "MOE": _MOE, "MLA": _MLA, "DEEPSEEK": _DEEPSEEK, "GPT": _GPT,
    "MULTIPLIERS": _alike("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"),
}  # fmt: skip
"""Keys that most rows share, by the name that a row calls them."""
_FUNCTIONS: dict[str, Any] = {
    name: value for module in (derivations, layer_lists, sections) for name, value in vars(module).items()
}


def _architectures(rows: Mapping[str, dict[str, Any]]) -> dict[str, Architecture]:
    """The rows of the table; one goes on from another that stands before it."""
    built: dict[str, Architecture] = {}
    for name, row in rows.items():
        like = built.get(row.get("like", ""), Architecture({}, {}, (), {}, ()))
        built[name] = Architecture(
            keys=_keys(like.keys, row.get("keys", ())),
            defaults=like.defaults | row.get("defaults", {}),
            derive=(*like.derive, *map(_function, row.get("derive", ()))),
            fixed=like.fixed | row.get("fixed", {}),
            sections=tuple(row.get("inside", like.sections)),
        )
    return {name: row for name, row in built.items() if not name.startswith("_")}


def _keys(own: Keys, items: list[Any]) -> Keys:
    """The keys of a row: groups, fields that are spelled alike, `-field` to leave one out, other spellings."""
    keys = dict(own)
    for item in items:
        if isinstance(item, dict):
            keys |= {name: (spelt,) if isinstance(spelt, str) else tuple(spelt) for name, spelt in item.items()}
        elif item.startswith("-"):
            keys.pop(item[1:])
        else:
            keys |= GROUPS.get(item) or _alike(item)
    return keys


def _function(entry: Any) -> Any:
    """A function by its name, or the one that `{name: arguments}` makes; without arguments the function itself.

    A mapping among the arguments names a function, too, unless it is one of fields.
    """
    if not isinstance(entry, dict):
        return _FUNCTIONS[entry]
    ((name, arguments),) = entry.items()
    if arguments is None:
        return _FUNCTIONS[name]
    given = arguments if isinstance(arguments, list) else [arguments]
    return _FUNCTIONS[name](
        *(_function(each) if isinstance(each, dict) and each.keys() <= _FUNCTIONS.keys() else each for each in given)
    )


_HERE = Path(__file__).parent
ARCHITECTURES = _architectures(load_yaml(_HERE / "rows.yaml"))
_NAMES = load_yaml(_HERE / "names.yaml")
SAME_AS: dict[str, str] = _NAMES["same_as"]
"""Models that call a known architecture by a name of their own, in lower case with underscores."""
OTHER: dict[str, tuple[str, bool, str]] = {name: tuple(row) for name, row in _NAMES["other"].items()}
"""Kinds that are another where the value of a key is set, or is not."""
INNER: tuple[str, ...] = tuple(_NAMES["inner"])
"""Keys under which a multimodal config holds that of its language model, whose `model_type` decides."""
WRAPPERS: dict[str, str] = _NAMES["wrappers"]
"""Language models of multimodal configs whose inner config names none."""
REFUSED: dict[str, str] = {name: lacks for lacks, names in _NAMES["refused"].items() for name in names}
"""Architectures that the planner has no operators for, and what it lacks; names in lower case."""

_EPSILONS = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layernorm_epsilon",
    "rms_norm_epsilon",
)  # fmt: skip
_ROUTER = {
    "routed_scaling_factor":
        ("routed_scaling_factor", "moe_routed_scaling_factor", "router_scaling_factor", "route_scale",
         "moe_router_scaling_factor"),
    "norm_topk_prob": ("norm_topk_prob", "moe_renormalize", "route_norm"),
    "n_group": ("n_group", "num_expert_group"),
    "topk_group": ("topk_group",),
    "router_aux_loss_coef": ("router_aux_loss_coef", "aux_loss_alpha", "moe_loss_weight", "load_balance_coeff"),
    "router_z_loss_coef": ("router_z_loss_coef", "router_z_loss_coeff"),
    "seq_aux": ("seq_aux",),
}  # fmt: skip
"""Fields of the router and the keys that may hold them, first choice first."""
_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrtsoftplus", "noaux_tc": "sigmoid"}
_SCALINGS = {
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
_UNSCALED = (None, "default", "none", "mrope", "proportional")
"""Names of rotary positions that stretch no frequency: those of images run along more than one axis."""
_SCALING_NUMBERS = (
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "attention_factor", "truncate", "short_factor", "long_factor",
)  # fmt: skip


def norm_eps(config: Config) -> Derived:
    """The number under the root of a norm."""
    return {"norm_eps": first_of(config, _EPSILONS)}


def soft_caps(config: Config) -> Derived:
    """Caps of logits, and queries that are not scaled by the width of their head."""
    caps = {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping") if config.get(key)}
    scalar = config.get("query_pre_attn_scalar")
    if isinstance(scalar, int | float) and not isinstance(scalar, bool) and scalar > 0:
        caps["attention_multiplier"] = 1 / math.sqrt(scalar)
    return caps


def rotary(config: Config) -> Derived:
    """Rotary settings: rope_scaling as transformers 4 wrote it, rope_parameters as transformers 5 does."""
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(stated, Mapping):
        return {}
    local = stated.get("sliding_attention")
    base = {"rope_local_base_freq": local.get("rope_theta")} if isinstance(local, Mapping) else {}
    whole = stated.get("full_attention", stated)
    if not isinstance(whole, Mapping):
        return base
    if base and base["rope_local_base_freq"] == whole.get("rope_theta", config.get("rope_theta")):
        base = {}
    scaling = _scaling(whole, config)
    return base | ({"rope_scaling": scaling} if scaling else {})


def _scaling(stated: Mapping[str, Any], config: Config) -> Derived | None:
    name = stated.get("rope_type", stated.get("type"))
    if name in _UNSCALED:
        return None
    if not isinstance(name, str):
        raise InexpressibleError(f"rope_scaling: rope_type: {name!r:.60} is {kind_of(name)}, expected text")
    if name not in _SCALINGS:
        _log.warning("rope_scaling: %s is not known and left out: no price depends on it, an export does", name[:60])
        return None
    numbers = {key: stated[key] for key in _SCALING_NUMBERS if stated.get(key) is not None}
    original = config.get("original_max_position_embeddings")
    if original is not None and name != "linear":
        numbers.setdefault("original_max_position_embeddings", original)
    return {"rope_type": _SCALINGS[name], **numbers}


def router(config: Config) -> Derived:
    """How a router scores, groups, scales and balances."""
    fields = {name: first_of(config, spellings) for name, spellings in _ROUTER.items()}
    groups = fields["n_group"]
    if groups in (None, 0, 1):
        fields["n_group"] = fields["topk_group"] = None
    scores = first_of(
        config, ("scoring_func", "score_function", "score_func", "moe_router_activation_func", "moe_router_activation")
    )
    fields["scoring_func"] = _SCORES.get(scores, scores) if isinstance(scores, str) else scores
    return filled(fields.items())


def _vision(config: Config, text_hidden: Any, where: str) -> Derived:
    """The tower of a multimodal config; one that the table does not know is named, and left out."""
    config = mapping_in(config, "thinker_config") or config
    stated = config.get("vision_config")
    looked = _Looked(mapping_in(config, "vision_config"))
    found = (
        sections.vision_of({**config, "vision_config": looked}, text_hidden) if isinstance(text_hidden, int) else None
    )
    if found is None and isinstance(stated, Mapping):
        _log.warning("%s: vision left out: only the language model is planned", where)
    elif renamed := _renamed(looked, looked.looked_at):
        _log.warning("%s: vision_config: not read, and may change parameters: %s", where, ", ".join(renamed))
    return {} if found is None else {"vision": found}


def warn_of_towers(config: Config, where: str) -> None:
    """Name the parts of a multimodal model that are not planned."""
    kinds = (key for key, one in config.items() if key != "vision_config" and isinstance(one, Mapping))
    towers = [key.removesuffix("_config") for key in kinds if _TOWERS.search(key)]
    if towers:
        _log.warning("%s: %s left out: only the language model is planned", where, " and ".join(towers))


_TOWERS = re.compile("vi(sion|sual|t_)|audio|talker|code2wav|encoder|img_processor|embd_layer")
"""Keys of what a multimodal model has beside its language model, and which is not planned."""


class _Looked(dict[str, Any]):
    """A config that knows which of its keys were asked for."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.looked_at: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.looked_at.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.looked_at.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, which counts as asked for."""
        self.looked_at.add(key)
        return super().get(key, default)


_DECIDES = re.compile(
    r"hidden_size|intermediate|latent|expert|_rank$|heads?$|layers?$|_dim$|kernel|block_size|gate$|gated?_|_size$|_freq$"
    r"|interval|pattern|mtp|nextn|attn_res|compress|conv_|state_size|shared?_|(?<!un)tied?_|merge|stride"
    r"|window|_expand$|d_(model|state|conv|ssm|rel)$|n_embd|hc_mult|(?<!norm_)(?<!grouped_)topk$|groups$|dense_replace"
    r"|layer_(end|period|offset)|qk_(layer)?norm$|_loops$|head_bias$|parallel_(attn|residual)$|(post|sandwich)_norm$|expert_num$|num_inputs$|sparse_.*config$"
)
"""Names of keys that may say sizes, layers or parts of a model."""
_SAYS_NOTHING = re.compile(
    r"max_position|_token_id|dropout|initializer|rope_(?!head|layer)|_loss|loss_|num_(beam|return|labels)|chunk_size|ep_size|pretraining"
    r"|^vocab_size_per|image|vision|audio|video|_rms_|first_token|quantiz|softmax_in|fan_in|router_(jitter|aux|z)|_eps|epsilon"
    r"|init_|resid_|num_logits|seq_length|training_tp|use_cache|architectures|position|encoder|classifier|mrope|hidden_act"
    r"|mtp_hybrid|num_expert_group|n_shared_experts|zero_expert|index_share|index_topk_freq|^qk_head_dim|moe_layer_freq|block_dim"
    r"|attn_output_gate|expert_(parallel|capacity)|^(moe_|shared_|moe_shared_expert_)?intermediate_size$|^num_(hidden_layers|experts)$|^moe_k$|^head_dim"
    r"|group_norm_size|kda_|granularity|router_enable|^(use_)?sliding_window$|^no_rope_layer_interval$|^first_k_dense_replace$|^max_window_layers|attention_chunk|temperature|original_|tie_encoder|keep_last|generation|dtype"
    r"|_kernels$|_overlap$|^mtp_layers_block|num_hash_layers|block_group|limited_groups|_conv_states$|^indexer_kv|output_gate_type|^[lr]m_head$|^spatial_merge"
)
"""Names among them that say nothing of what a layer is."""


_OF_OTHERS = re.compile("mamba_hidden_act|(compress|layer)_rope_theta|^(fullatt|mtp|mm|text|projector)_|topk_pattern")
"""Names of keys that hold those of others and say nothing of these."""


def _words(key: str) -> frozenset[str]:
    return frozenset(re.split(r"[_\d]+", key))


def _renamed(config: Config, read: set[str]) -> Config:
    """Keys that nobody read with all words of one that is read and absent: they may be that one, whatever they say."""
    absent = [words for words in map(_words, read - config.keys()) if sum(map(len, words)) > 4]
    unread = {key for key in config.keys() - read if not _OF_OTHERS.search(key) and not _is_listed(key, config)}
    return {key: config[key] for key in config if key in unread and any(words <= _words(key) for words in absent)}


def _is_listed(key: str, config: Config) -> bool:
    """True for a pattern of layers where a list says the same."""
    return "pattern" in key and bool(config.get("layer_types"))


def _tell_unread(config: Config, read: set[str], where: str) -> None:
    """Name the keys that nobody read and that may say what a layer is. Raises InexpressibleError for a size of it."""
    left = {
        key: value
        for key, value in config.items()
        if key not in read
        and value not in (None, False, 0, "", [], {})
        and not isinstance(value, float)
        and (not isinstance(value, dict) or "sparse" in key)
        and _DECIDES.search(key)
        and not _SAYS_NOTHING.search(key)
        and not _is_listed(key, config)
    }
    sizes = [key for key, value in left.items() if not isinstance(value, bool | str)]
    size = next((key for key in sizes if re.search(r"hidden_size$|intermediate|latent|expert", key)), None)
    if size is not None:
        raise InexpressibleError(f"{size}: {str(left[size])[:60]}: no layer of this architecture here has it")
    if left := {**_renamed(config, read), **left}:
        listed = ", ".join(f"{key} {str(value)[:40]}" for key, value in [*left.items()][:8])
        _log.warning("%s: not read, and may change parameters: %s", where, listed)


_CANONICAL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "sliding_window")
"""Fields that functions read under our names, however a config spells them."""
_TRACED = "trace it: plan models trace hf-code:{} -o model.yaml"


def from_config(config: Config, where: str) -> ModelSpec:
    """The model that a `config.json` describes; `where` names the file in messages.

    Raises SpecError for an unknown architecture, a missing or wrong field, or a layer pattern ModelSpec has not.
    """
    whole, (config, row) = config, _architecture(config, where)
    stated = config
    for section in row.sections:
        config = {**mapping_in(config, section), **config}
    config = {**_rotary_base(config), **config}
    given = _Looked({**row.defaults, **config})
    keys = {
        name: _first_key(spellings, config) or _first_key(spellings, row.defaults) or spellings[0]
        for name, spellings in row.keys.items()
    }
    given |= {name: given[keys[name]] for name in _CANONICAL if name in keys and keys[name] in given}
    fields: Derived = {
        name: given[key] for name, key in keys.items() if key in given and not _is_unsaid(name, given[key])
    }
    try:
        check_switches(config)
        for read in (norm_eps, soft_caps, rotary, router):
            fields |= read(given)
        fields |= row.fixed
        for function in row.derive:
            fields |= function(given)
        fields = without_unused_sections(fields) | _vision(whole, fields.get("hidden_size"), where)
        known = {*given.looked_at, *row.defaults, *(key for names in row.keys.values() for key in names)}
        known |= {prefix + name for name in row.fixed for prefix in ("", "use_")} & stated.keys()
        _tell_unread(stated, known, where)
        if "moe" in fields or not {"num_experts"} & (keys.keys() | fields.keys()):
            # no experts, whatever the keys of a router say
            fields = {name: value for name, value in fields.items() if name not in MoESpec.model_fields}
        return ModelSpec.model_validate({"name": _name(config, where), "source": f"config.json ({where})", **fields})
    except InexpressibleError as error:
        raise SpecError(f"{where}: {error}", "write the model as YAML, or mend the config") from None
    except ValidationError as error:
        raise spec_error(error, where, ModelSpec, _spelling(keys, given)) from None


def _architecture(config: Config, where: str) -> tuple[Config, Architecture]:
    """The language model's own config and its row of the table."""
    kind = _kind_of_model(config)
    if kind in REFUSED:
        raise SpecError(
            f"{where}: model_type: {kind!r} has {REFUSED[kind]}",
            _TRACED.format(PurePath(where).parent),
        )
    for key in INNER:
        inner = config.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise SpecError(f"{where}: {key}: {kind_of(inner)}, not a mapping", "give the language model's own config")
        warn_of_towers(config, where)
        # transformers 5 writes at the top whether the language model's embeddings are tied, and never ties if not there
        tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        inner = inner if tied.get("tie_word_embeddings") is None else {**inner, **tied}
        named = {"_name_or_path": config.get("_name_or_path")}
        stated = {} if "model_type" in inner else {"model_type": WRAPPERS.get(kind, kind)}
        return _architecture({**tied, **stated, **inner, **named}, where)
    if kind in WRAPPERS and "hidden_size" not in config:
        raise SpecError(f"{where}: text_config: nothing, not a mapping", "give the language model's own config")
    name = SAME_AS.get(kind, WRAPPERS.get(kind, kind))
    key, where_set, other = OTHER.get(name, ("", True, ""))
    name = other if key in config and bool(config[key]) is where_set else name
    if name in ARCHITECTURES:
        warn_of_towers(config, where)
        return config, ARCHITECTURES[name]
    problem = "is missing" if kind == "None" else f"unknown architecture {kind[:60]!r}"
    known = {*ARCHITECTURES, *SAME_AS, *WRAPPERS}
    raise SpecError(
        f"{where}: model_type: {problem}", f"{_TRACED.format(PurePath(where).parent)}{nearest(kind, known)}"
    )


def _kind_of_model(config: Config) -> str:
    """The `model_type` in lower case with underscores, as long as that is what the table knows; else the class's."""
    stated, classes = config.get("model_type"), config.get("architectures")
    if not isinstance(stated, str):
        known = {kind.replace("_", ""): kind for kind in (*ARCHITECTURES, *SAME_AS)}
        made = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
        return known.get(made.removesuffix("ForCausalLM").lower(), str(stated))
    plain = stated.lower()
    for kind in (stated, plain, plain.replace("-", "_")):
        if kind in ARCHITECTURES or kind in SAME_AS or kind in WRAPPERS or kind in REFUSED:
            return kind
    return stated


def _is_unsaid(name: str, value: Any) -> bool:
    """True for a null under the key of a field that has a value of its own where none is given."""
    field = ModelSpec.model_fields.get(name)
    return value is None and field is not None and not field.is_required()


def _rotary_base(config: Config) -> Config:
    """Rotary settings as transformers 5 writes them: in rope_parameters, or in those of full attention."""
    stated = mapping_in(config, "rope_parameters")
    stated = mapping_in(stated, "full_attention") or stated
    return {name: stated[name] for name in ("rope_theta", "partial_rotary_factor") if name in stated}


def _first_key(keys: tuple[str, ...], config: Config) -> str | None:
    return next((key for key in keys if key in config), None)


def _name(config: Config, where: str) -> str:
    """The last part of `_name_or_path`, else the directory of a config.json, else the file's stem."""
    stated = config.get("_name_or_path")
    path = PurePath(where)
    candidates = (
        PurePath(stated).name if isinstance(stated, str) else "",
        path.parent.name if path.name == "config.json" else path.stem,
        str(config.get("model_type")),
    )
    return next(name for name in candidates if name)[:200]


def _spelling(keys: Mapping[str, str], config: Config) -> dict[str, str]:
    """The config's keys by our field paths, so that a message names what the user wrote."""
    sections = {"moe": MoESpec.model_fields, "mla": MLASpec.model_fields}
    activation = _first_key(("activation_function", "hidden_activation"), config)
    spelling = {"activation": activation or "hidden_act"}
    for field, key in keys.items():
        section = next((name for name, names in sections.items() if field in names), None)
        spelling[f"{section}.{field}" if section else field] = key
    return spelling
