"""A configuration as a reader gets it, and the run as it was read, with everything that was not understood."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from planner.errors import LayoutError, SpecError
from planner.record import record
from planner.specs.base import Fields, Named, Said, filled
from planner.specs.model import ModelSpec
from planner.specs.reading import parse_json, parse_yaml, printable, shipped_table, text_beside
from planner.specs.registry import load_model, model_names
from planner.specs.shipped import find


def json_of(text: str, hint: str) -> Any:
    """The value that a JSON text holds. Raises SpecError with the hint where it is none, or nested too deeply."""
    return parse_json(text, "", hint, keeps_last=True)


def yaml_of(text: str, hint: str) -> Any:
    """The value that a YAML text holds. Raises SpecError with the hint where it is none, or nested too deeply."""
    return parse_yaml(text, "", hint, keeps_last=True)


def has_line(text: str, mark: str) -> bool:
    """A line of the text, or several, is as a regular expression says."""
    return re.search(mark, text, re.MULTILINE) is not None


_REPLACED = re.compile(r"(:\s*)(?=[,}\]])|(:\s*|\[\s*|,\s*)[A-Z][A-Z0-9_]{2,}(?=\s*[,}\]])")


def object_of(text: str, hint: str = "give the file that is passed as --deepspeed_config") -> Fields:
    """The object of a JSON text; values that a script puts in (`CONFIG_BATCH_SIZE`, or none) are null."""
    found = json_of(_REPLACED.sub(r"\1\2null", text), hint)
    if not isinstance(found, dict):
        raise SpecError("the file holds no JSON object", hint)
    return found


_PARENTS = 12


@record
class ConfigFile:
    """A configuration's text and what is known around it."""

    text: str
    path: Path | None = None
    """Its path; None for text that was piped in."""
    recipe: str | None = None
    """The function or entry that the user chose, where a file has several."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the user gives a value, whatever the text says."""
    written: Named = field(default_factory=dict)
    """Files that its script writes, and their texts."""

    def has_line(self, mark: str) -> bool:
        """A line of the text is as a regular expression says."""
        return has_line(self.text, mark)

    def beside(self, name: str) -> str | None:
        """The text of a file that the configuration names, if it lies in the same folder or below it.

        A path that the reader cannot know in full (`$DIR/conf.sh` with DIR unset) is looked for by its end.
        """
        if self.path is None or not name or name in self.written:
            return self.written.get(name)
        folder, parts = self.path.parent, [part for part in PurePosixPath(name).parts if part not in ("/", ".", "..")]
        near = name.lstrip("/")
        if near.startswith("../") and (text := text_beside(folder / near)) is not None:
            return text
        for start in range(len(parts)):
            found = folder.joinpath(*parts[start:])
            if found != self.path and (text := text_beside(found)) is not None:
                return text
        return self.above("/".join(parts)) if len(parts) > 1 else None

    def above(self, name: str) -> str | None:
        """The text of the file at a relative path in the configuration's folder or in one that holds it."""
        if self.path is None:
            return None
        return next((text for folder in self._roots(0) if (text := text_beside(folder / name)) is not None), None)

    def module(self, name: str, level: int = 0) -> ConfigFile | None:
        """The Python module that the configuration imports, where its file lies in the same tree of packages."""
        if self.path is None:
            return None
        parts = [part for part in name.split(".") if part]
        for folder in self._roots(level):
            files = [folder.joinpath(*parts).with_suffix(".py")] if parts else []
            for path in (*files, folder.joinpath(*parts, "__init__.py")):
                if (text := text_beside(path)) is not None:
                    return ConfigFile(text, path)
        return None

    def filled(self) -> ConfigFile:
        """The configuration with the user's variables put in, where its text is no shell's: `${NAME}`, `${NAME:-…}`."""
        if not self.variables:
            return self
        text = self.text
        for name, value in self.variables.items():
            text = re.sub(rf"\$\{{(?:oc\.env:|env:)?{name}(?:[:,][^}}]*)?\}}|\${name}\b", lambda _: value, text)  # noqa: B023
        return replace(self, text=text)

    def _roots(self, level: int) -> Iterator[Path]:
        """Folders that a module's dotted name may begin in."""
        assert self.path is not None
        parents = [self.path.absolute().parent, *self.path.absolute().parent.parents]
        if level:
            yield from parents[level - 1 : level]
            return
        yield from parents[:_PARENTS]


_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def published_name(model: Fields) -> str | None:
    """The shipped model with the same layers, widths, heads, vocabulary and experts, or None."""
    for name, spec in _shipped():
        num_experts = None if spec.moe is None else spec.moe.num_experts
        same_sizes = all(model.get(field) == getattr(spec, field) for field in _SIZES)
        same_sizes &= (spec.indexer is None) == (model.get("indexer") is None)
        if same_sizes and (model.get("moe") or {}).get("num_experts") == num_experts:
            return name
    return None


@cache
def _shipped() -> tuple[tuple[str, ModelSpec], ...]:
    """Every model that ships; to look up each file for each question is a fifth of an import's time."""
    return tuple((name, load_model(name)) for name in model_names())


_GRID = re.compile(
    r"(tensor|pipeline|context|expert|sequence|data|model)[-_.]*(model[-_.]*)?parallel|parallelism|\b(tp|pp|cp|ep|dp)(_size|_degree)?$"
    r"|num[-_](layers(?![-_]at)|experts|attention)|hidden[-_]size|(micro|global|train)[-_]batch|seq[-_]?len|nnodes|nproc|world[-_]size"
)
"""Names of settings that say a layout, a batch or a model's sizes."""


class Undecided(NamedTuple):
    """A setting that is not understood, what it could say, and the run then."""

    name: str
    says: str
    run: Fields


def _as_said(run: Said, row: Said) -> Fields | None:
    """The fields of a run that a row of the table says; None where the run has them."""
    layout, features = run["parallelism"], run.get("features") or {}
    least = {name: max(number, layout.get(name) or 0) for name, number in row.get("at_least", {}).items()}
    said = {
        "parallelism": {**layout, **least, **row.get("layout", {})},
        "features": {**features, **row.get("features", {})},
        **{name: value for name, value in row.get("fields", {}).items() if not (name == "adapters" and run.get(name))},
    }
    return {name: value for name, value in said.items() if value and value != run.get(name)} or None


_REQUIRED = {
    "model": "add --model NAME",
    "num_gpus": "add --gpus N",
    "seq_length": "add --seq-length N",
    "global_batch_size": "add --global-batch-size N",
}
"""Fields without which a run cannot be priced, and how the user adds them."""


_BESIDE = {
    "scored_tokens": "log-probabilities of up to {:,} tokens at once",
    "rollout_fraction": "{:.0%} of memory for generation",
    "critics": "{} critic as large as the policy",
    "frozen_copies": "{} frozen models as large as the policy",
}
"""Fields of an objective, and what is told of each."""


@dataclass(slots=True)
class ImportedRun:
    """A run as `plan evaluate --runs` takes it, and the fate of every option."""

    source: str
    """The trainer whose configuration it is: megatron, torchtitan, deepspeed, …"""
    run: Fields
    """Fields of a run; some may be missing, which only the user can say."""
    ignored: Named = field(default_factory=dict)
    """Options that change neither seconds nor bytes of a step."""
    unknown: Named = field(default_factory=dict)
    """Options that this planner does not know: they may matter."""
    assumed: Named = field(default_factory=dict)
    """Settings that the configuration leaves out, and what the trainer has then."""
    documented: str = ""
    """The place of the trainer's defaults."""
    notes: list[str] = field(default_factory=list)
    """Assumptions, and settings that a plan has no word for."""
    refused: list[str] = field(default_factory=list)
    """Reasons why the trainer ends before its first step, beside those that the layout's rules know."""
    model_name: str = ""
    """The name of the model, which is told where the planner does not know it."""
    again: Callable[[str | Fields], ImportedRun] | None = None
    """The same configuration read with a model that the user names, where what is read depends on the model."""

    optimizer_instances: int = 1
    """Copies of the sharded optimizer; the number of GPUs says over how many ranks each is sharded."""
    accumulates_whole: bool = False
    """True where sharded weights stay gathered from the first micro-batch of a step to the last."""
    predicts_further: bool = True
    """Multi-token prediction of a published model is trained too; without, its blocks are left out, as transformers
    does and Megatron core unless it is asked for them."""
    pads: bool = False
    """Examples are padded to the longest of a micro-batch, and not packed."""
    microbatches_per_rank: int | None = None
    """Micro-batches of a data-parallel rank in a step, for configurations that count the batch so."""

    def complete(
        self, *, vocab_size: int | None = None, tp: int | None = None, pp: int | None = None, **given: Any
    ) -> Fields:
        """The run with the fields that the user adds or replaces, as `plan evaluate --runs` takes it.

        Fields beside those named here are a run's own: model, hardware, num_gpus, … A number of GPUs other than the
        configuration's leaves dp to be found again, and a model with the sizes of a published one gets its name.
        Raises SpecError for a field that is still missing.
        """
        self._refuse_unknown_grid()
        added = filled(given.items())
        if self.again is not None and "model" in added:
            other = self.again(added["model"])
            self.run["parallelism"], self.run["features"] = other.run["parallelism"], other.run["features"]
            self.refused = other.refused
        run = {**self.run, **added}
        if _by_own_name(run.get("hardware")) != _by_own_name(self.run.get("hardware")):
            run["inter_node"] = added.get("inter_node")  # a manifest's rate is of its own GPUs
        if self.pads and "document_lengths" in added:
            longest = max(entry["length"] for entry in added["document_lengths"])
            run |= {"batching": "padded", "seq_length": min(run["seq_length"] or longest, longest)}
        axes = filled((("tp", tp), ("pp", pp)))
        layout = run["parallelism"] = {**run["parallelism"], **axes}
        if "num_gpus" in added and added["num_gpus"] != self.run.get("num_gpus"):
            layout.pop("dp", None)
        if isinstance(run["model"], dict):
            run["model"] = self._model(run["model"], vocab_size)
        ranks = max(1, layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1))
        if (run.get("num_gpus") or 0) % ranks and "num_gpus" not in added:
            raise LayoutError(
                f"{self.source}: it starts {run['num_gpus']} GPUs, which tp·cp·pp ({ranks}) does not divide",
                f"add --gpus {-run['num_gpus'] // ranks * -ranks}, or another multiple of {ranks}",
            )
        if run.get("global_batch_size") is None and run.get("num_gpus") and self.microbatches_per_rank:
            dp = layout.get("dp") or max(1, run["num_gpus"] // ranks)
            run["global_batch_size"] = layout.get("micro_batch_size", 1) * self.microbatches_per_rank * dp
        self._refuse_missing(run)
        if not self.predicts_further and isinstance(run["model"], str):
            spec = load_model(run["model"])
            if spec.num_nextn_predict_layers:
                run["model"] = spec.without_predictions().model_dump(mode="json")
        if self.accumulates_whole:
            each = layout.get("micro_batch_size", 1) * (layout.get("dp") or run["num_gpus"] // ranks)
            layout["zero_stage"] = 1 if run["global_batch_size"] > each else layout["zero_stage"]
        if self.optimizer_instances > 1:
            shards = run["num_gpus"] // (layout["tp"] * layout["pp"] * self.optimizer_instances)
            layout["fsdp"] = max(1, shards)
        return filled(run.items())

    def _refuse_missing(self, run: Fields) -> None:
        """Raise SpecError for a field that is still missing, or whose model nobody knows."""
        for name, hint in _REQUIRED.items():
            if run.get(name) is not None:
                continue
            if name == "model" and self.model_name:
                if (variable := re.fullmatch(r"\$\{(\w+)\}", self.model_name)) is not None:
                    told = f"{self.source}: the model: ${variable[1]} is not set in the script"
                    raise SpecError(told, f"add --model NAME, or --set {variable[1]}=VALUE")
                raise SpecError(
                    f"{self.source}: unknown model {printable(self.model_name, 80)!r}",
                    "add --model with a name that `plan models` lists, or with the model's config.json",
                )
            least = least_gpus(run["parallelism"])
            multiple = f", a multiple of {least}" if name == "num_gpus" and least > 1 else ""
            raise SpecError(f"{self.source}: {name} is not in the configuration", hint + multiple)

    def put(self, said: Said) -> None:
        """Put in what settings say (readings.yaml): fields, layout, features, what is not understood, and texts."""
        layout, features = self.run["parallelism"], self.run["features"]
        places = {"run": self.run, "layout": layout, "features": features, "unknown": self.unknown}
        for part, place in (places | {"model": self.run["model"] or {}}).items():
            if found := said.get(part):
                place.update(found)
        self.notes += said["notes"]
        self.refused += said["refused"]
        self.microbatches_per_rank = said.get("microbatches_per_rank", self.microbatches_per_rank)
        for name, value in said.get("offloads", {}).items():
            self.offload_all(name, value)
        if beside := said.get("beside"):
            self.reinforce(**beside)
        if said.get("is_padded"):
            self.note_unpacked()

    def offload_all(self, name: str, value: object = "true") -> None:
        """FSDP's CPUOffload, which the setting `name` says, of a run that shards its weights."""
        if self.run["parallelism"].get("zero_stage") == 3:
            self.run["features"]["parameter_offload"] = "all"
        else:
            self.unknown[name] = str(value)

    def reinforce(self, **told: float) -> None:
        """Price what reinforcement learning holds on a GPU beside a policy's update, and needs between two.

        These are fields of an objective: tokens that are scored at once, the share of memory that answers are generated
        in, critics, and models that are not trained.
        """
        self.run["objective"] = {name: value for name, value in told.items() if value}
        beside = [says.format(told[name]) for name, says in _BESIDE.items() if told.get(name)]
        if beside:
            self.notes.append(f"counted beside an update: {', '.join(beside)}")
        else:
            del self.run["objective"]

    def _refuse_unknown_grid(self) -> None:
        """Raise SpecError for a setting that nobody knows and that would decide the grid or the model's sizes."""
        for name, value in self.unknown.items():
            number = re.fullmatch(r"\s*0*(\d*)\s*", value)
            if number is not None and number[1] not in ("", "1") and _GRID.search(name.rpartition(".")[2]):
                raise SpecError(
                    f"{self.source}: {printable(name, 80)} {value.strip()[:40]} is not understood, and would decide "
                    "the layout or the model",
                    "mend its name, or take it out and say what it means with --tp, --pp, --gpus or --model",
                )

    def undecided(self, run: Said) -> list[Undecided]:
        """The run as each setting that is not understood could make it, where that can be priced."""
        found = []
        for name in self.unknown:
            rows = shipped_table("export/dialects.yaml")["undecided"].items()
            row = next((row for pattern, row in rows if re.search(pattern, name, re.IGNORECASE)), None)
            if row is not None and (other := _as_said(run, row)) is not None:
                found.append(Undecided(name, row["says"], {**run, **other}))
        return found

    def assume(self, unasked: Said) -> None:
        """Note settings that the configuration leaves out, by their names in it, as the trainer has them."""
        self.assumed |= {name: str(value) for name, value in unasked.items()}

    def ignore(self, is_harmless: Callable[[str], Any]) -> None:
        """Settings that are not understood and change neither bytes nor seconds."""
        for name in [name for name in self.unknown if is_harmless(name)]:
            self.ignored[name] = self.unknown.pop(name)

    def note_unpacked(self) -> None:
        """Note that sequences of different lengths are not packed into one, but padded to the longest of them."""
        self.pads = True
        if (length := self.run["seq_length"]) is not None:
            self.notes.append(
                f"without packing: priced as if each sequence were {length:,} tokens long, the most that a step takes; "
                "--example-lengths MEAN:MAX tells its mean"
            )

    def rename(self, names: Mapping[str, str]) -> None:
        """Call settings as the configuration does, where a reader knows them by other names."""
        for told in ("assumed", "unknown", "ignored"):
            setattr(self, told, {names.get(name, name): value for name, value in getattr(self, told).items()})

    def _model(self, sizes: Fields, vocab_size: int | None) -> Fields:
        """The model's fields with the user's vocabulary, and the name of the published model that has them."""
        model = {**sizes, "vocab_size": sizes.get("vocab_size") if vocab_size is None else vocab_size}
        if model["vocab_size"] is None:
            raise SpecError(f"{self.source}: vocab_size is not in the configuration", "add --vocab-size N")
        return model | {"name": published_name(model) or model.get("name", "model")}


def new_run(source: str, runtime: str, **fields: Any) -> ImportedRun:
    """A run of a trainer to be filled in, with the fields that are known already."""
    unsaid = dict.fromkeys(("model", "num_gpus", "runtime", "seq_length", "global_batch_size"))
    said = {"runtime": runtime, "dtype": "bf16", "parallelism": {}, "features": {}}
    return ImportedRun(source, {**unsaid, **said, **fields})


def positive_number(
    data: Said, name: str, hint: str = "write a number", unsaid: Collection[Any] = (None,)
) -> int | None:
    """A whole number of 1 or more in a configuration; None where it is one of the values that stand for none."""
    value = data.get(name)
    if value in unsaid:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name}: {value!r:.60} is no positive number", hint)
    return value


def least_gpus(layout: Fields) -> int:
    """The fewest GPUs that a layout's ranks fill: one replica of each stage, for the experts as for the rest."""
    attention, experts = (layout.get("tp", 1) * layout.get("cp", 1), layout.get("ep", 1) * (layout.get("etp") or 1))
    stages: int = max(1, layout.get("pp", 1))
    return stages * math.lcm(max(1, attention), max(1, experts))


def _by_own_name(hardware: str | Fields | None) -> object:
    """Hardware; what ships is the same by each of its names."""
    return find("hardware", hardware) or hardware if isinstance(hardware, str) else hardware
