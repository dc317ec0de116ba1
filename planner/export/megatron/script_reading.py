"""A Megatron-LM launch script, argument list or MODEL_ARGS YAML as a run; Megatron-DeepSpeed's scripts, too."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from planner.errors import SpecError
from planner.export.followed.shell_script import AROUND, Script, read_script
from planner.export.imported_run import ConfigFile, ImportedRun, new_run, object_of, published_name
from planner.export.keyed_settings import beginnings, count, num_gpus, readings, table
from planner.export.megatron.deepspeed_options import (
    DEEPSPEED_OPTIONS,
    as_megatron,
    check_is_gpt,
    is_megatron_deepspeed,
    read_zero,
)
from planner.export.megatron.model_options import MODEL_OPTIONS, PATTERNS, read_model, resized, with_pattern
from planner.export.megatron.option_rows import Options, broken_rows, number, options_of, read_fields, reading, text
from planner.export.megatron.option_rows import table as option_table
from planner.export.megatron.plan_options import (
    KERNELS,
    LAYOUT_OPTIONS,
    PRECISION_OPTIONS,
    SWITCH_OPTIONS,
    SWITCHING,
    read_dtype,
    read_layout,
    read_scales,
)
from planner.export.named_models import Model, moe_of, num_layers_of
from planner.export.spelling import canonical, read_switches, unexplained
from planner.specs.base import Fields, Named
from planner.specs.expressions import text_of, value_of
from planner.trainers.switches import SWITCHES

_OF_MIXTURES = ("dispatcher", "shared_expert_overlap", "fused_experts", "ep_overlap", "token_drop")
FEATURE_OPTIONS = SWITCHING | PRECISION_OPTIONS | KERNELS.names_read() | {"--hidden-dropout"}


def options_of_features() -> dict[str, frozenset[str]]:
    """The options that say each feature, in any value."""
    pairs = [(row.switch, option) for row in SWITCH_OPTIONS for option in row.settings]
    pairs += [(feature, row.name) for row in KERNELS.rows for feature in row.fields_read]
    return {name: frozenset(option for other, option in pairs if other == name) for name, _ in pairs}


def _said(options: Options, source: str) -> Fields:
    """A run's features, as Megatron-LM has them where no option names them, and notes."""
    features: Fields = canonical(
        read_switches(SWITCH_OPTIONS, {name: words or True for name, words in options.items()})
    )
    if read_dtype(options) == "fp16":
        # gradients of fp16 are 16 bits wide unless they are asked to be 32
        features["bf16_gradients"] = "--accumulate-allreduce-grads-in-fp32" not in options
    names = {"features": features, "dtype": read_dtype(options), "source": source}
    said = readings("megatron", options, **reading(options), **names, fields_of=SWITCHES["precision_recipe"].fields_of)
    left_out = () if "--num-experts" in options else _OF_MIXTURES
    features = {name: value for name, value in (features | said["features"]).items() if name not in left_out}
    return {**said, "features": features | read_fields([KERNELS], options)}


_ROW = table()["megatron"]
_IGNORED = beginnings(_ROW["harmless"], "--(no-)?")
"""Options that change what is learned, written or logged, not how long a step takes."""
_LAUNCHER = beginnings(_ROW["launchers"], "--")
"""Options of torchrun and srun: the run says their part as a number of GPUs."""


def sort_unread(options: Options, read: Collection[str], imported: ImportedRun) -> None:
    """Note every option that is not `read` as ignored where it is known to be harmless, else as unknown."""
    for name, values in options.items():
        if name in read or _LAUNCHER.match(name):
            continue
        is_harmless = (
            _IGNORED.match(name) or name in _ROW["needed"] or " ".join(values).lower() in _ROW["usual"].get(name, ())
        )
        (imported.ignored if is_harmless else imported.unknown)[name] = " ".join(values)


READ_OPTIONS = frozenset(
    {"--global-batch-size", "--seq-length", *FEATURE_OPTIONS, *LAYOUT_OPTIONS, *MODEL_OPTIONS, *PATTERNS}
)
"""The options that are read."""
_SIZES = ("--num-layers", "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--model-parallel-size")


def read_megatron(config: ConfigFile) -> ImportedRun:
    """The run that a script (or a list of arguments) starts. Raises SpecError for values that are no numbers."""
    script = read_script(config)
    words = _words(script)
    options = dict(options_of(words))
    check_is_gpt(words, options)
    for name in ("TOKENIZER_MODEL", "TOKENIZER", "HF_MODEL_CKPT"):
        if name in script.variables and not text(options, "--tokenizer-model"):
            options["--tokenizer-model"] = script.variables[name]
    program = next((word for word in script.words if re.fullmatch(r"[\w./-]*\.py", word)), None)
    if not any(name in options for name in (*_SIZES, *PATTERNS)):
        starts = f": it starts {program}, a program of its own" if program else ""
        raise SpecError(f"the script passes no Megatron-LM arguments{starts}", _what_it_is(words, starts))
    is_deepspeed = is_megatron_deepspeed(options)
    source, also_read = ("megatron-deepspeed", DEEPSPEED_OPTIONS) if is_deepspeed else ("megatron", ())
    imported = run_of(as_megatron(options) if is_deepspeed else options, script, source, also_read)
    if program and not re.search(_ROW["own_programs"], program):
        imported.notes.append(f"it starts {program[-80:]}: what that program sets by itself is not read")
    if not is_deepspeed:
        return imported
    imported.run["runtime"] = "megatron-deepspeed"
    read_zero(options, _deepspeed_config(options, script, config), imported)
    if "--embed-layernorm" in options and imported.run["model"] is not None:
        imported.run["model"]["embedding_norm"] = True
    return imported


def _what_it_is(words: Sequence[str], starts: str) -> str:
    """A hint by the words of the launch: whose script it looks like."""
    text = " ".join(words)
    known = (hint for mark, hint in _ROW["looks_like"].items() if re.search(mark, text))
    own = "name the trainer that it is built on with --from"
    return next(known, own if starts else "give the script that calls pretrain_gpt.py")


def _words(script: Script) -> list[str]:
    """The words of the launch; where a file only sets variables, those of all of them that hold options."""
    if any(word.startswith("--") for word in script.words):
        return script.words
    return [word for words in script.variables.values() for text in words for word in _split(text)]


def _split(text: str) -> list[str]:
    return text.split() if re.match(r"\s*--\w", text) else [text]


def _deepspeed_config(options: Options, script: Script, config: ConfigFile) -> Fields:
    """DeepSpeed's own configuration: written by the script, or a file beside it; empty where there is none."""
    name = text(options, "--deepspeed_config") or text(options, "--deepspeed-config")
    source = config.beside(name)
    if source is None and len(script.files) == 1:
        source = next((written for written in script.files.values() if written.lstrip().startswith("{")), None)
    return object_of(source or "{}")


def run_of(
    options: Options,
    script: Script,
    source: str,
    also_read: Collection[str] = (),
    named: Model | None = None,
) -> ImportedRun:
    """The run that Megatron-LM's options describe; a model that they do not name is left to the user.

    `named` is a model that the configuration names and does not describe. Raises SpecError for values that are no
    numbers, asking for variables that the script leaves to its surroundings.
    """
    try:
        imported = _run_of(options, script, source, also_read, named)
    except SpecError as error:
        variable = script.unset.get(error.message.partition(":")[0])
        if variable is None:
            raise
        option = error.message.partition(":")[0]
        raise SpecError(f"{option}: ${variable} is not set in the script", f"add --set {variable}=N") from None
    for option in [
        option for option in _ROW["takes_words"].split() if option in script.unset and options.get(option) == []
    ]:
        raise SpecError(
            f"{option}: ${script.unset[option]} is not set in the script", f"add --set {script.unset[option]}=WORD"
        )
    imported.unknown |= script.unpassed
    for option, variable in script.unset.items():
        if AROUND.search(variable):
            continue
        if options.get(option, []) == [] and (option in READ_OPTIONS or option.startswith("$")):
            imported.unknown[f"${variable}"] = (
                f"behind {option}: not set in the script" if option[0] != "$" else "not set"
            )
    return imported


_PARSERS = {"megatron": ("parser", "main"), "slime": ("parser",), "primus": ("parser",)}
"""Trainers that Megatron-LM's own parser starts: that of main, or an older one that they bring along."""


def _run_of(
    options: Options, script: Script, source: str, also_read: Collection[str], named: Model | None
) -> ImportedRun:
    options = with_pattern(options)
    if named is None and "--num-layers" in options and _ROW["plugin"] in text(options, "--spec"):
        # what its layers are stands in Python, and the model of these sizes has them
        named = published_name(read_model(options))
        also_read = {*also_read, *_ROW["of_plugin"].split()} if named else also_read
    model: Model | None = None
    described = options
    if named is not None:
        model = found = resized(named, options)
        described = {**options, **_options_of_model(found)}
    elif "--num-layers" in options and ("--hidden-size" in options or source.startswith("megatron")):
        model = read_model(options)
    said = _said(described, source)
    imported = new_run(
        source,
        "megatron",
        model=model,
        num_gpus=num_gpus(options, script),
        gpus_per_node=number(options, "--nproc-per-node") or count([script.directives.get("gpus-per-node", "")]),
        seq_length=number(options, "--seq-length") or number(options, "--max-position-embeddings"),
        global_batch_size=number(options, "--global-batch-size"),
        dtype=read_dtype(options),
        precision_recipe=read_scales(options),
        parallelism=read_layout(described),
        features=said["features"],
    )
    if named is None and not source.startswith("megatron") and not {"--vocab-size", "--tokenizer-type"} & {*options}:
        # GPT-2's vocabulary is what Megatron-LM alone takes unasked
        imported.run["model"] = None if model is None else {**read_model(options), "vocab_size": None}
    if model is None:
        imported.again = lambda model: run_of(options, script, source, also_read, model)
    imported.optimizer_instances = number(options, "--num-distributed-optimizer-instances", 1) or 1
    imported.microbatches_per_rank = 1
    imported.notes += said["notes"]
    imported.assumed = unsaid_options(described)
    imported.documented = _ROW["documented"]
    # DeepSpeed's pipelines take other splits and other words
    imported.refused = []
    if source not in ("megatron-deepspeed", "neox"):
        around = {name: script.variables[name] for name in script.variables if name == "CUDA_DEVICE_MAX_CONNECTIONS"}
        imported.refused = refusals({**described, **around}, _PARSERS.get(source, ()))
    unsaid = unexplained(SWITCH_OPTIONS, {name: words or True for name, words in options.items()})
    sort_unread(options, {*READ_OPTIONS, *also_read} - unsaid, imported)
    return imported


def _options_of_model(model: Model) -> Options:
    """The options of a model by name that others are read beside."""
    mixture = moe_of(model)
    experts = {} if mixture is None else {"--num-experts": [str(mixture["num_experts"])]}
    return {"--num-layers": [str(num_layers_of(model))], **experts}


def unsaid_options(options: Options) -> Named:
    """The options that decide and are not given, with what they are then."""
    has_experts = "--num-experts" in options
    parts = ["unasked", *(["unasked_of_model"] if "--hidden-size" in options else [])]
    parts += ["unasked_of_experts"] if has_experts else []
    deciding = {name: value for part in parts for name, value in _ROW[part].items()}
    return {
        name: str(value)
        for name, value in deciding.items()
        if name not in options and not any(other in options for other in _ROW["instead"].get(name, ()))
    }


def refusals(options: Options, parsers: Collection[str] = _PARSERS["megatron"]) -> list[str]:
    """Why the trainer ends before its first step. Raises SpecError where it would build fewer layers than there are."""
    return [says for _, says in named_refusals(options, parsers)]


def named_refusals(options: Options, parsers: Collection[str] = _PARSERS["megatron"]) -> Iterator[tuple[str, str]]:
    """Each refusal by its name: those of the table, of stages, and of sizes that do not divide.

    `parsers` are those of Megatron-LM that take the options, which refuse more than Megatron core.
    """
    rows = option_table()["refused"].items()
    yield from broken_rows({name: row for name, row in rows if row.get("by") in (None, *parsers)}, options)
    names, sizes = reading(options), option_table()["sizes"]
    for name, expression in sizes["names"].items():
        names[name] = value_of(expression, names)
    for name, row in sizes["refused"].items():
        if row.get("by") in (None, *parsers) and value_of(row["if"], names):
            if row.get("loses"):
                # an older version went on with fewer layers than the model has
                hint = "give the pipeline that these layers are for, or leave them out"
                raise SpecError(text_of(row["says"], names), hint)
            yield name, text_of(row["says"], names)
