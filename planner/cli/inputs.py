"""Options of the command line as specs. The model's published training stands in for what was not given."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any, TypeVar

from planner.cli.measurements import read_calibration, with_history
from planner.cli.options import (
    DEFAULT_HARDWARE,
    DEFAULT_RUNTIME,
    JobOptions,
    LayoutOptions,
    PlanOptions,
    SearchOptions,
)
from planner.errors import SpecError
from planner.record import record
from planner.shape import liked_batch
from planner.specs.base import Fields, Said, Spec, filled
from planner.specs.cluster import ClusterSpec, parse_tiers
from planner.specs.hardware import HardwareSpec, LinkTier
from planner.specs.machines import with_host, with_network
from planner.specs.model import ModelSpec
from planner.specs.problems import among, checked, with_fields
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import (
    OBJECTIVES,
    PINS,
    AdapterSpec,
    ObjectiveSpec,
    OperationsSpec,
    Parallelism,
    SearchLimits,
    TrainingSpec,
)
from planner.specs.units import SIZE, is_count, parse_count, parse_number, parse_whole, unit_of
from planner.trainers.generations import as_built, described, imbalance_of, objection_to_silicon, todays, usual_trainer
from planner.trainers.load import load_runtime, switches_of
from planner.trainers.rules.recipe import Setting
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import DEFAULT, Recipe, check_together, stated_consents, stated_switches

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.search.case import Case

_log = logging.getLogger(__name__)
_OPTION_OF = {
    "num_gpus": "gpus", "time_limit_s": "time_limit", "memory_headroom_gib": "memory_headroom",
    "network_gb_per_s": "assume", "switches": "switch", "num_spare_nodes": "spares",
}  # fmt: skip
"""Fields that an option spells differently."""
_OF_HARDWARE = {"host_us": ("efficiency", "host_us"), "host_memory_gib": ("host", "memory_gib")}
"""Fields of the hardware that --assume names: the time to issue a kernel of an eager layer, the host's GiB a GPU."""
_OF_CLUSTER = ("network_gb_per_s", *_OF_HARDWARE)
"""All that --assume names beside the runtime's fields."""
_ASSUMED = ("cuda_graphs", "masks_documents")
"""Fields of a runtime that can be assumed otherwise beside those of overlaps."""
_TRUTH = {"true": True, "false": False}
_MAX_ENTRIES = 10_000
"""Most entries of a list."""
_IMAGES = re.compile(r"(\d{1,6})(?:x([1-9]\d{0,8}))?(:trained)?")
SMALL_GIB = 40.0
"""Memory of a GPU below which few train a model from its beginning."""
MANY_TOKENS = 10**9
"""Tokens of a step beyond which a batch was meant in tokens: published ones have up to 10⁸."""
S = TypeVar("S", bound=Spec)
J = TypeVar("J", bound=JobOptions)


@record
class Job:
    """A model, the cluster and the trainer that train it, and how."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    runtime: str
    runtime_spec: RuntimeSpec
    assumed: Recipe
    """The switches that --assume gives a value to."""
    says_switches: bool | Collection[str] = False
    """The switches that options say; true where they say what the trainer overlaps, or that all are its own."""

    def searched(self, limits: SearchLimits) -> Case:
        """The job as the search takes it."""
        from planner.search.case import Case

        return Case(self.model, self.cluster, self.training, self.runtime_spec, limits)


def read_case(asked: SearchOptions, said: set[str] | None = None) -> Case:
    """The job that the options describe, and how it is searched; `said` is as in `read_job`."""
    job = read_job(asked, said)
    return job.searched(read_limits(asked, job))


def read_job(asked: JobOptions, said: set[str] | None = None) -> Job:
    """The job that the options describe; SpecError naming the option. `said` holds what was said of the history for
    another job of the command."""
    if asked.model is None or (asked.gpus is None and asked.nodes is None):
        raise SpecError(
            f"--{'model' if asked.model is None else 'gpus'}: is missing", "for example plan --model 405b --gpus 2048"
        )
    if asked.model == asked.hardware == "-":
        raise SpecError("--model and --hardware: both read standard input", "name a file for one of them")
    model, hardware = load_model(asked.model), _hardware(asked)
    asked, adapters = in_gpus(asked, hardware.gpus_per_node), read_adapters(asked)
    tunes = adapters is not None or asked.finetune
    name = asked.runtime or usual_trainer(model, hardware, tunes)
    runtime = load_runtime(name)
    if (objection := objection_to_silicon(runtime, hardware)) is not None:
        other = runtime.family if runtime.family != runtime.name else todays(DEFAULT_RUNTIME, hardware.architecture)
        raise SpecError(f"--runtime: {objection}", f"--runtime {other}")
    assumed, switches = _assumed(asked.assume or "", runtime)
    cluster = _cluster(asked, hardware, {field: assumed.pop(field) for field in _OF_CLUSTER if field in assumed})
    if assumed:
        runtime = with_fields(runtime, assumed, "--assume")
    if asked.calibration is not None:
        calibration = read_calibration(asked.calibration, cluster, runtime.family)
        cluster, runtime = calibration.of_cluster(cluster), calibration.of_runtime(runtime)
    elif not asked.no_history:
        cluster = with_history(cluster, runtime, said)
    training = _routed(asked, _training(asked, model, hardware, adapters), model, runtime, switches)
    model = as_built(_seeing(model, asked.images, training), runtime)
    _note_doubts(asked, cluster, tunes, training.tokens_per_step)
    if training.operations.num_spare_nodes is not None:
        from planner.months.whole_run import check_spares

        check_spares(cluster, training)
    return Job(model, cluster, training, name, runtime, switches, says_switches=bool(assumed) or switches.keys())


def _hardware(asked: JobOptions) -> HardwareSpec:
    """The GPU of --hardware, or the default one, on the network and the host of --network and --host."""
    hardware = load_hardware(DEFAULT_HARDWARE if asked.hardware is None else asked.hardware)
    if asked.network is not None:
        hardware = with_network(hardware, asked.network, "--network")
    return hardware if asked.host is None else with_host(hardware, asked.host, "--host")


def _cluster(asked: JobOptions, hardware: HardwareSpec, assumed: Fields) -> ClusterSpec:
    """The GPUs and the network between them, with what --assume says of host and network."""
    for name, (part, field) in _OF_HARDWARE.items():
        if name in assumed:
            before: Spec = getattr(hardware, part)
            after = with_fields(before, {field: assumed.pop(name)}, "", {field: f"--assume {name}"})
            hardware = hardware.model_copy(update={part: after})
    values = {"hardware": hardware, "num_gpus": asked.gpus, "gpus_per_node": asked.gpus_per_node, **assumed}
    if asked.tier is not None:
        values["network_tiers"] = _network(asked.tier, hardware, values)
    return checked_options(ClusterSpec, values)


def _note_doubts(asked: JobOptions, cluster: ClusterSpec, tunes: bool, tokens_per_step: int) -> None:
    """Say on stderr what the options mean where they may mean something else."""
    if not tunes and asked.runtime is None and cluster.hardware.memory_gib < SMALL_GIB:
        _log.info("this plans a training from the beginning; --finetune trains a model further, --lora or --qlora less")
    if asked.global_batch_size is not None and tokens_per_step >= MANY_TOKENS:
        _log.warning("--global-batch-size: %s sequences are %s tokens a step; --batch-tokens %d says tokens",
                     f"{asked.global_batch_size:,}", f"{tokens_per_step:,}", asked.global_batch_size)  # fmt: skip
    nodes, rest = divmod(cluster.num_gpus, cluster.node_size)
    if nodes and rest:
        _log.info("--gpus %d: %d × %d GPUs in whole nodes, and %d of another node", cluster.num_gpus, nodes,
                  cluster.node_size, rest)  # fmt: skip


def in_gpus(asked: J, node_size: int) -> J:
    """The options with --nodes as --gpus. SpecError where both are given and differ."""
    if asked.nodes is None:
        return asked
    gpus = asked.nodes * (asked.gpus_per_node or node_size)
    if asked.gpus not in (None, gpus):
        raise SpecError(f"--gpus {asked.gpus} and --nodes {asked.nodes}: {gpus} GPUs", f"--gpus {gpus}")
    return replace(asked, gpus=gpus, nodes=None)


def _network(text: str, hardware: HardwareSpec, values: Said) -> tuple[LinkTier, ...]:
    """The tiers of --tier. Raises SpecError where they do not go with the rest of the cluster."""
    if "network_gb_per_s" in values:
        raise SpecError("--tier and --assume network_gb_per_s: both given", "leave network_gb_per_s out")
    tiers = parse_tiers(text, hardware)
    domain = checked_options(ClusterSpec, values).tiers[0].num_gpus or values["gpus_per_node"] or hardware.gpus_per_node
    if (innermost := tiers[0].num_gpus) is not None and innermost <= domain:
        joined = f"{hardware.fabric} joins {domain} GPUs of {hardware.name}, which no network tier is inside of"
        wrong = f"--tier: {tiers[0].name}:{innermost}: {joined}"
        raise SpecError(wrong, f"give {tiers[0].name} more than {domain} GPUs, or leave it out")
    return tiers


def read_limits(asked: SearchOptions, job: Job) -> SearchLimits:
    """Axes pinned by comma lists, the switches pinned and allowed, and how to search."""
    values = given_of(asked, SearchLimits)
    if (switches := _switches(asked, job)) is not None:
        values["switches"] = switches
    if "allow" in values:
        values["allow"] = stated_consents(values["allow"], job.runtime_spec, job.cluster.hardware)
    for name in PINS:
        if name in values:
            values[name] = listed(name, values[name], str if name in ("recompute", "schedule", "rank_order") else int)
    return checked_options(SearchLimits, values)


def read_parallelism(asked: LayoutOptions) -> Parallelism:
    """One layout; what was not given is unset."""
    values = given_of(asked, Parallelism)
    if "layers_per_stage" in values:
        values["layers_per_stage"] = listed("layers_per_stage", values["layers_per_stage"], int)
    if "recompute_modules" in values:
        values["recompute_modules"] = listed("recompute_modules", values["recompute_modules"], str)
    return checked_options(Parallelism, values)


def read_described(asked: LayoutOptions, job: Job) -> Job:
    """The job of a run that exists: its trainer has the switches stated, and the likely values of those unsaid.

    Raises SpecError for switches that do not go with the job or with each other.
    """
    switches = _switches(asked, job, describes=True)
    if switches == DEFAULT:
        return replace(job, says_switches=True)
    stated = switches or {}
    # a dtype alone sums gradients no narrower, as in a plan; recipes of benchmarks say so
    wide = job.runtime_spec.model_copy(update={"narrow_gradient_bytes": None})
    runtime, _ = described(wide, job.cluster.hardware, job.model, stated)
    check_together(Setting(job.model, job.cluster, job.training, runtime), stated)
    training = _routed(asked, job.training, job.model, runtime, stated)
    says = job.says_switches is True or stated.keys()
    return replace(job, training=training, runtime_spec=runtime, says_switches=says)


def priced(asked: LayoutOptions) -> tuple[Job, Job, Plan]:
    """The job of today's trainer, the same as the options describe its layout, and the price of that layout."""
    from planner.layout.evaluate import evaluate
    from planner.trainers.stated import of_today

    job = read_job(asked)
    job = replace(job, runtime_spec=of_today(job.runtime_spec))
    run, layout = read_described(asked, job), read_parallelism(asked)
    runtime, says = run.runtime_spec, run.says_switches
    return job, run, evaluate(run.model, run.cluster, run.training, layout, runtime=runtime, says_switches=says)


def _switches(asked: SearchOptions | LayoutOptions, job: Job, describes: bool = False) -> Any:
    """The switches of --switch, --optimizer and --assume together, or `default`; None where none states any."""
    stated = {} if asked.switch is None else stated_switches(asked.switch, job.runtime_spec, describes=describes)
    if stated == DEFAULT:
        if job.assumed or asked.optimizer is not None:
            other = "--assume" if job.assumed else "--optimizer"
            raise SpecError(f"--switch default and {other}: both state switches", "leave --switch out")
        return stated
    for other, more in (("--assume", job.assumed), ("--optimizer", read_optimizer(asked, job.runtime_spec))):
        for name in stated.keys() & more:
            raise SpecError(f"--switch and {other}: {name}: given twice", "keep one of them")
        stated = {**stated, **more}
    return stated or None


def _assumed(text: str, runtime: RuntimeSpec) -> tuple[dict[str, float | bool], Recipe]:
    """`tp_overlap_fraction=0,ep_overlap=false` as fields with their values, and as switches with theirs."""
    fields = [field for field in RuntimeSpec.model_fields if "overlap" in field] + [*_ASSUMED, *_OF_CLUSTER]
    has = switches_of(runtime)
    assumed = {}
    switches = []
    for part in filter(None, text.split(",", _MAX_ENTRIES)):
        field, _, value = part.partition("=")
        if field in has:
            switches.append(part)
            continue
        if field not in fields:
            known = [*fields, *has]
            raise SpecError(f"--assume: {field[:60]!r} is unknown", among(known, field))
        try:
            assumed[field] = _TRUTH[value] if value in _TRUTH else float(parse_number(value, unit_of(field)))
        except (ValueError, OverflowError):
            wrong = f"--assume: {field}: {value[:60]!r} is no number"
            raise SpecError(wrong, f"write {field}={50 if field in _OF_CLUSTER else 0}") from None
    stated = stated_switches(",".join(switches), runtime, "--assume") if switches else {}
    return assumed, stated if isinstance(stated, dict) else {}


def option(field: str) -> str:
    """The command line's spelling of a field."""
    return "--" + _OPTION_OF.get(field, field).replace("_", "-")


def given_of(asked: JobOptions, spec: type[Spec]) -> Fields:
    """Values of the fields of `spec` that options were given for."""
    pairs = ((field, getattr(asked, _OPTION_OF.get(field, field), None)) for field in spec.model_fields)
    return filled(pairs)


def checked_options(spec: type[S], values: Said) -> S:
    """The `spec` of values that options gave. SpecError names the option."""
    spelling = {field: option(field) for field in spec.model_fields}
    tuples = {field: value for field, value in values.items() if isinstance(value, tuple)}
    spelling |= {f"{field}[{i}]": option(field) for field, value in tuples.items() for i in range(len(value))}
    return checked(spec, values, spelling=spelling)


def listed(field: str, text: str, convert: type[int] | type[str]) -> tuple[Any, ...]:
    """`8,16` as (8, 16)."""
    words = [part.strip() for part in text.split(",", _MAX_ENTRIES)]
    if "" in words:
        raise SpecError(f"{option(field)}: {text[:60]!r} has an empty entry", "put one comma between two values")
    if convert is str:
        return tuple(words)
    try:
        return tuple(parse_whole(word, "size") for word in words)
    except (ValueError, OverflowError):
        raise SpecError(f"{option(field)}: {text[:60]!r} is not a list of whole numbers", "write 8 or 8,16") from None


def _training(
    asked: JobOptions, model: ModelSpec, hardware: HardwareSpec, adapters: AdapterSpec | None
) -> TrainingSpec:
    published, tunes = model.training, adapters is not None or asked.finetune
    if published is None and not tunes:
        _refuse_unstated(asked, model)
    seq_length = asked.seq_length
    if seq_length is None:
        seq_length = TUNING_SEQ_LENGTH if tunes or published is None else published.seq_length
    objective = read_objective(asked, adapters)
    batches = read_batches(asked, seq_length, objective)
    seq_length = batches.get("seq_length", seq_length)
    values = {
        "seq_length": seq_length, "global_batch_size": objective.row.num_sequences, "adapters": adapters,
        "starts_trained": asked.finetune,
        "objective": objective, "tokens": None if asked.tokens is None else count_of("tokens", asked.tokens),
        **batches, "operations": _operations(asked),
    }  # fmt: skip
    others = {name: getattr(asked, name) for name in ("dtype", "moe_imbalance", "straggler_fraction")}
    values |= {"dtype": hardware.usual_dtype, **filled(others.items())}
    checked_options(TrainingSpec, values)  # the batch is counted in sequences of a sane length
    batch = _global_batch_size(asked, model, seq_length, tunes=tunes)
    if objective.has_pairs and batch % 2:
        odd = f"{batch:,} is odd, and {objective.name} takes pairs of sequences"
        raise SpecError(f"--global-batch-size: {odd}", f"--global-batch-size {batch + 1}")
    least = batch * seq_length
    if asked.tokens is not None and values["tokens"] < least:
        enough = f"{asked.tokens.strip()}T" if is_count(asked.tokens.strip()) else least
        few = f"{asked.tokens[:60]} are fewer than the {least:,} of one step"
        raise SpecError(f"--tokens: {few}", f"--tokens {enough}")
    return checked_options(TrainingSpec, {**values, "global_batch_size": batch})


def _seeing(model: ModelSpec, asked: str | None, training: TrainingSpec) -> ModelSpec:
    """The model with the images that --images gives a sequence: `4`, `4x256` tokens each, `4:trained`, `0` for none."""
    vision, match = model.vision, _IMAGES.fullmatch(asked or "1")
    if match is None:
        raise SpecError(f"--images: {asked!s:.60} is no number of images", "write 4, 4x256, 4x256:trained or 0")
    number = int(match[1])
    if vision is None or not number:
        if number and asked is not None:
            wrong = f"--images {asked}: {model.name} has no vision tower"
            raise SpecError(wrong, "--model DIR/config.json of one that has")
        return model.model_copy(update={"vision": None})
    if match[3] and training.adapters is not None:
        raise SpecError(f"--images {asked}: adapters leave the tower frozen", f"--images {number}")
    most = training.seq_length // number if vision.in_sequence else vision.image_tokens
    tokens = int(match[2]) if match[2] else max(min(vision.image_tokens, most), 1)
    if tokens > most:
        raise SpecError(
            f"--images {asked}: {number * tokens:,} tokens are more than the {training.seq_length:,} of a sequence",
            f"--images {number}x{most}" if most else f"--images {training.seq_length}x1",
        )
    changed = {"images_per_sequence": number, "image_tokens": tokens, "is_trained": bool(match[3])}
    return model.model_copy(update={"vision": vision.model_copy(update=changed)})


def _routed(
    asked: JobOptions, training: TrainingSpec, model: ModelSpec, runtime: RuntimeSpec, features: Recipe
) -> TrainingSpec:
    """`training` with experts as uneven as such runs have them, unless an option says it."""
    if asked.moe_imbalance is not None:
        return training
    tunes = training.adapters is not None or asked.finetune
    return training.model_copy(update=imbalance_of(model, features, runtime, tunes).fields)


def _refuse_unstated(asked: JobOptions, model: ModelSpec) -> None:
    """Raise SpecError for all that neither the options nor the model's own training say."""
    lacks = []
    if asked.seq_length is None:
        lacks.append(("--seq-length", "--seq-length 8k"))
    if asked.global_batch_size is None and asked.batch_tokens is None:
        lacks.append(("--global-batch-size", "--global-batch-size 1024 (sequences) or --batch-tokens 4M"))
    if lacks:
        names = " and ".join(name for name, _ in lacks)
        raise SpecError(
            f"{names}: {'is' if len(lacks) == 1 else 'are'} missing, and {model.name} states no training",
            f"add {' '.join(add for _, add in lacks)}; or a `training:` of seq_length and tokens_per_step to the model",
        )


def _operations(asked: JobOptions) -> OperationsSpec:
    given = given_of(asked, OperationsSpec)
    ends = {"days": asked.days, "usd": asked.usd} if isinstance(asked, PlanOptions) else {}
    dated = next((name for name, value in ends.items() if value is not None), None)
    is_counted = asked.tokens is not None or asked.examples is not None
    if dated is not None and is_counted:
        raise SpecError(
            f"--{dated}: asks how many tokens, which are given",
            f"leave --{dated} out; plan sweep finds the GPUs that a deadline or a budget asks for",
        )
    if given and not is_counted and dated is None:
        _log.warning("%s: has no effect without --tokens", ", ".join(map(option, given)))
    return checked_options(OperationsSpec, given)


def _global_batch_size(asked: JobOptions, model: ModelSpec, seq_length: int, tunes: bool) -> int:
    sequences, tokens = asked.global_batch_size, asked.batch_tokens
    if sequences is not None and tokens is not None:
        raise SpecError("--global-batch-size and --batch-tokens: both given", "give one of them")
    if sequences is not None:
        return sequences
    num_gpus = asked.gpus or 1
    if tokens is None and tunes:
        return max(TUNING_BATCH_SIZE, num_gpus)
    if tokens is not None:
        return _batch_near("--batch-tokens", tokens, count_of("batch_tokens", tokens), seq_length, num_gpus)
    assert model.training is not None  # or it was refused
    published = model.training.tokens_per_step
    if published % seq_length == 0:
        return published // seq_length
    return _batch_near(f"{model.name}'s published batch", f"{published:,}", published, seq_length, num_gpus)


def _batch_near(what: str, text: str, num_tokens: int, seq_length: int, num_gpus: int) -> int:
    """The batch, in sequences, that is near some tokens and that the GPUs divide best; it is said where it is another.

    16M is 16·10⁶, but people also call 2,048 sequences of 8,192 tokens 16M: where 16·2²⁰ is a whole number of
    sequences, it is as good an answer.
    """
    choices = [liked_batch(num_tokens / seq_length, num_gpus)]
    if text.strip()[-1].lower() in SIZE:
        binary = parse_number(text, "size") / seq_length
        choices.append(int(binary) if binary == int(binary) else None)
    batch = max((choice for choice in choices if choice), key=lambda size: gcd(size, num_gpus), default=None)
    if batch is None:
        sequences = num_tokens // seq_length
        sizes = (sequences, sequences + 1) if sequences >= num_gpus else (num_gpus,)
        near = (f"{what} {n * seq_length}" if what.startswith("--") else f"--global-batch-size {n}" for n in sizes)
        message = f"{what}: {num_tokens:,} tokens are no whole number of sequences of {seq_length:,}"
        raise SpecError(message, " or ".join(near))
    if batch * seq_length != num_tokens:
        taken = f"{batch * seq_length:,}, {batch:,} sequences"
        _log.info("%s: %s is taken as %s: near it, and good for %s GPUs", what, text, taken, f"{num_gpus:,}")
    return batch


def count_of(field: str, text: str) -> int:
    """The count in an option's text, such as 16M. Raises SpecError for what is none."""
    try:
        return parse_count(text)
    except (ValueError, OverflowError):
        raise SpecError(f"{option(field)}: {text[:60]!r} is not a count", "write 16777216, 16M or 15T") from None


TUNING_SEQ_LENGTH, TUNING_BATCH_SIZE = 2048, 16
"""Tokens of a sequence and sequences of a step where a job with adapters does not say them."""
_ADAPTER_FIELDS = {"rank": "lora_rank", "dropout": "lora_dropout", "base_bits": "base_bits"}


def read_optimizer(asked: JobOptions, runtime: RuntimeSpec) -> Recipe:
    """The switch that --optimizer pins. SpecError naming the option for one that the trainer does not have."""
    if asked.optimizer is None:
        return {}
    if "," in asked.optimizer:
        raise SpecError(f"--optimizer: {asked.optimizer[:60]!r} is more than one", "--optimizer adamw")
    try:
        stated = stated_switches(f"optimizer={asked.optimizer}", runtime, "--optimizer")
    except SpecError as error:
        error.hint = error.hint.replace("optimizer=", "--optimizer ")
        raise
    return stated if isinstance(stated, dict) else {}


def read_objective(asked: JobOptions, adapters: AdapterSpec | None) -> ObjectiveSpec:
    """The objective that the options ask for; its reference is the model without its adapters where it has any."""
    name, reference = asked.objective or "lm", asked.reference
    known = OBJECTIVES.get(name)
    if reference is not None and known is not None and not known.reference_forwards:
        raise SpecError(f"--reference: {name} has no reference model", "--objective dpo has one")
    if reference == "adapters" and adapters is None:
        raise SpecError("--reference adapters: no adapters are trained", "add --lora, or --reference model")
    values = {"name": name, "reference": reference or ("model" if adapters is None else "adapters")}
    return checked(ObjectiveSpec, values, spelling={"name": "--objective", "reference": "--reference"})


def read_adapters(asked: JobOptions) -> AdapterSpec | None:
    """The adapters that the options ask for; None where all weights are trained. SpecError names the option."""
    given = {field: value for field, name in _ADAPTER_FIELDS.items() if (value := getattr(asked, name)) is not None}
    if asked.lora_targets is not None:
        given["targets"] = tuple(part.strip() for part in asked.lora_targets.split(",", 100))
    if asked.qlora:
        if given.get("base_bits", 4) != 4:
            raise SpecError(f"--qlora and --base-bits {given['base_bits']}: weights of 4 bits", "--lora")
        given["base_bits"] = 4
    if not (asked.lora or asked.qlora or given):
        return None
    names = _ADAPTER_FIELDS | {"targets": "lora_targets"}
    spelling = {field: f"--{name.replace('_', '-')}" for field, name in names.items()}
    return checked(AdapterSpec, given, spelling=spelling)


def read_batches(asked: JobOptions, seq_length: int, objective: ObjectiveSpec) -> Fields:
    """The fields of a training that the options of examples say; SpecError names the option."""
    if asked.batching not in (None, "packed", "padded"):
        raise SpecError(f"--batching: {asked.batching[:60]!r} is none of packed and padded", "--batching packed")
    if asked.epochs is not None and asked.examples is None:
        raise SpecError("--epochs: without --examples, nothing says how long one is", "add --examples 50k")
    if asked.examples is not None and asked.tokens is not None:
        raise SpecError("--examples and --tokens: both given", "leave --tokens out")
    fields: Fields = {}
    if asked.example_lengths is None:
        if asked.batching == "padded":
            raise SpecError("--batching padded: nothing says how long examples are", "add --example-lengths 400:2048")
        mean = float(seq_length)
    else:
        from planner.specs.phases import lengths_in

        lengths = lengths_in(asked.example_lengths, "--example-lengths")
        is_padded = asked.batching != "packed"
        fields = {"document_lengths": lengths, "batching": "padded" if is_padded else "packed"}
        if is_padded:
            # no batch is longer than its longest example
            fields["seq_length"] = seq_length = min(seq_length, max(entry.length for entry in lengths))
        total = sum(entry.share for entry in lengths)
        mean = sum(min(entry.length, seq_length) * entry.share for entry in lengths) / total
    if asked.examples is None:
        return fields
    examples, epochs = count_of("examples", asked.examples), 1.0 if asked.epochs is None else asked.epochs
    tokens = examples * objective.row.num_sequences * mean * epochs
    return fields | {"examples": examples, "epochs": epochs, "tokens": tokens}
