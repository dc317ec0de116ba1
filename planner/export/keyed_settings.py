"""Settings by name, whichever way a trainer is given them, and the table of trainers' words (dialects.yaml).

A command line, YAML, JSON, or keywords in Python; GPUs by what launchers are asked for. The table says what its columns
mean.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from typing import Any

from planner.errors import SpecError
from planner.export.followed.shell_script import Script, read_script
from planner.export.imported_run import ConfigFile, ImportedRun, has_line, json_of, yaml_of
from planner.export.megatron.option_rows import Options, OptionWords, broken_rows, options_of, text
from planner.export.trainer_files import filled
from planner.specs.base import Fields, Named, Said, Texts
from planner.specs.expressions import standing, text_of, texts_of
from planner.specs.expressions import value_of as computed
from planner.specs.reading import literal, parse_python, shipped_table
from planner.specs.units import is_count


@dataclass(frozen=True, slots=True)
class Dialect:
    """A trainer's row."""

    name: str
    documented: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    unasked: Said = field(default_factory=dict)
    harmless: str = "(?!)"
    usual: Mapping[str, Texts] = field(default_factory=dict)
    """Values of settings that say nothing new."""
    marks: Texts = ()
    launched: str = ""
    read: frozenset[str] = frozenset()
    refused: Mapping[str, Said] = field(default_factory=dict)

    def is_harmless(self, key: str) -> bool:
        """The key moves neither the bytes nor the seconds of a step."""
        # YAML has keys that are no text
        return beginnings(self.harmless).match(str(key)) is not None

    def left_out(self, settings: Said) -> Fields:
        """The settings that are not given, as the trainer has them."""
        return {key: value for key, value in self.unasked.items() if key not in settings}

    def assume(self, imported: ImportedRun, unasked: Said) -> None:
        """Note the settings that are not given, and where the trainer's own stand."""
        imported.assumed, imported.documented = {}, self.documented
        imported.assume(unasked)

    def sort(
        self,
        imported: ImportedRun,
        settings: Said,
        read: Container[str] = (),
        harmless: Callable[[str, Any], bool] = lambda key, value: is_off(value) or is_empty(value),
    ) -> None:
        """Note every setting that is not read: as ignored where it is harmless, else as unknown."""
        for key, value in settings.items():
            if key not in read and key not in self.read:
                is_known = str(value) in self.usual.get(key, ()) or self.is_harmless(key) or harmless(key, value)
                (imported.ignored if is_known else imported.unknown)[str(key)] = str(value)[:200]


@cache
def beginnings(words: str, before: str = "") -> re.Pattern[str]:
    """The pattern of keys that begin with one of the words."""
    return re.compile(f"{before}({'|'.join(words.split())})")


def table() -> dict[str, Fields]:
    """dialects.yaml as it stands."""
    return shipped_table("export/dialects.yaml")


@cache
def dialect(name: str) -> Dialect:
    """The row of a trainer."""
    row = table()[name]
    own = {column: row[column] for column in Dialect.__slots__ if column in row}
    words = {"marks": tuple(row.get("marks", ())), "read": frozenset(row.get("read", "").split())}
    return Dialect(**{**own, **words, "name": name})


Settings = dict[str, Any]
_ON = (True, "true", "True", "yes", "1", 1, "y")
_OFF = (False, "false", "False", "no", "n")


def is_on(value: Any) -> bool:
    """A setting is true in any of the ways that YAML and command lines write it."""
    return not isinstance(value, (list, dict)) and value in _ON


def is_off(value: Any) -> bool:
    """A setting is false, or no setting."""
    return value is None or (isinstance(value, (bool, str)) and value in (*_OFF, "", "none", "None", "null"))


def is_empty(value: Any) -> bool:
    """A setting that is null, false, or without items."""
    return value in (None, False, [], {})


def refused_settings(settings: Settings, *names: str) -> list[str]:
    """Reasons why trainers of these names end before their first step, by their tables."""
    options: OptionWords = {}
    for name, value in flat(settings).items():
        items = value if isinstance(value, list) else [value]
        if not is_off(value) and items:
            options[str(name)] = ["true" if item is True or item in ("True", "yes") else str(item) for item in items]
    return [says for name in names for _, says in broken_rows(dialect(name).refused, options)]


@dataclass(slots=True)
class KeyedSettings:
    """A configuration's settings, and the words around them."""

    settings: Settings
    script: Script
    """The script that launches; an empty one for a file of settings."""
    num_gpus: int | None = None
    unread: Named = field(default_factory=dict)
    """Settings whose values only a run knows, and their texts."""
    program: str = ""
    """The text of a program that the script starts, beside it."""


def settings_of(config: ConfigFile, calls: re.Pattern[str] | None = None) -> KeyedSettings:
    """The settings of a text, and those of a YAML file that it names; `calls` are Python's that take settings.

    Raises SpecError for what is broken.
    """
    text = config.text
    if text.lstrip().startswith("{") and not has_line(text, r"^\s*#"):
        data = json_of(text, "give the file of arguments")
        return KeyedSettings(data if isinstance(data, dict) else {}, Script())
    if has_line(text, r"^\s*(import|from) \w") and not re.match(r"#!(?!.*python)", text):
        return _of_python(text, calls)
    if has_line(text, r"^[\"']?[A-Za-z_]\w*[\"']?:(\s|$)") and not has_line(text, rf"{_SHELL}|^\s*--\w"):
        return KeyedSettings(mapping_of(text), Script())
    return _of_script(config, calls)


_SHELL = r"\A#!|^\w.*<<-?\s*['\"]?\w"


def mapping_of(text: str) -> Settings:
    """The mapping that a YAML text holds."""
    if has_line(text, _SHELL):
        raise SpecError("is a script around the settings", "give the file of settings that it writes")
    data = yaml_of(text, "give the configuration's file")
    if not isinstance(data, dict):
        raise SpecError("the file holds no settings", "give the configuration's file")
    return data


_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MAX_DEPTH, _MAX_TEXT = 16, 2_000


def resolved(settings: Settings) -> Settings:
    """The settings with OmegaConf's `${section.name}`, `${.beside}` and `${mul:2,${…}}` put in; unknown ones stay."""

    def value(key: str, match: re.Match[str]) -> str:
        name, colon, rest = match[1].partition(":")
        words = [word.strip(" '\"") for word in rest.split(",")]
        if not colon:
            dots = len(name) - len(name.lstrip("."))
            path = ".".join([*(key.split(".")[:-dots] if dots else []), name.strip(" .")])
            found = settings.get(path)
            return match[0] if isinstance(found, (dict, list)) or path not in settings else str(found)
        if name in ("oc.select", "oc.env") and len(words) == 2:
            return str(settings.get(words[0], words[1]))
        if name not in resolvers or len(words) != 2 or not all(re.fullmatch(r"-?\d{1,12}(\.\d+)?", w) for w in words):
            return match[0]
        made = computed(resolvers[name], dict(zip("ab", map(float, words), strict=True)))
        return str(int(made)) if made == int(made) else str(made)

    found, resolvers = dict(settings), table()["resolvers"]
    for key, said in settings.items():
        text = said
        for _ in range(_MAX_DEPTH):
            if not isinstance(text, str) or "${" not in text or len(text) > _MAX_TEXT:
                break
            text = _INNERMOST.sub(partial(value, key), text)
        found[key] = value_of(text) if text != said else said
    return found


def value_of(text: str) -> Any:
    """The value that a word of an override says."""
    words = {"True": True, "False": False, "None": None, "null": None, "true": True, "false": False, "": None}
    if text in words:
        return words[text]
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    try:
        return json_of(text.replace("'", '"'), "") if text.startswith("[") else text
    except SpecError:
        return text


def overrides_of(words: Sequence[str]) -> Settings:
    """The settings that words like `a.b=1`, `+a.b=1` and `--a.b 1` override, by their paths."""
    pairs = [word.lstrip("+").partition("=") for word in words]
    found = {
        path: value_of(value) for path, equals, value in pairs if equals and re.fullmatch(r"[A-Za-z_][\w.@/-]*", path)
    }
    dotted = {name[2:]: given[0] for name, given in options_of(words).items() if "." in name and given}
    return found | {path: value_of(value) for path, value in dotted.items()}


def flat(data: Said, prefix: str = "") -> Settings:
    """Nested tables as `section.name`."""
    settings: Settings = {}
    for key, value in data.items():
        settings |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return settings


def _of_script(config: ConfigFile, calls: re.Pattern[str] | None) -> KeyedSettings:
    script = read_script(config)
    # words of an option end where the program begins, whose own file may stand behind it
    options = {
        option: list(takewhile(lambda word: word != "-m" and not word.endswith(".py"), words))
        for option, words in options_of(script.words).items()
    }
    settings, unread, program = Settings(), script.unpassed, ""
    for name in [word for word in script.words if word.endswith((".yaml", ".yml")) and not word.startswith("-")]:
        if any(name in words for option, words in options.items() if option not in ("--config", "--config-path")):
            continue
        if (text := config.beside(name)) is not None:
            settings |= mapping_of(text)
        else:
            unread[name] = "is not beside the file"
    # words of the command line come before the file that it names
    settings |= dict(word.split("=", 1) for word in script.words if re.match(r"[a-z_]\w*=", word))
    for name, values in options.items():
        key = name.lstrip("-").replace("-", "_")
        unset = script.unset.get(name)
        settings[key] = (
            (f"${{{unset}}}" if unset else True) if not values else values[0] if len(values) == 1 else values
        )
    for name in [word for word in script.words if word.endswith(".py")]:
        # a program that says its arguments itself, under those of the command line
        if calls is not None and (text := config.beside(name)) is not None:
            said, program = _of_python(text, calls, settings), text
            settings, unread = {**said.settings, **settings}, {**said.unread, **unread}
    gpus = num_gpus({n.replace("_", "-"): w for n, w in options.items()}, script)
    cards = ",".join(script.variables.get("CUDA_VISIBLE_DEVICES", [])).count(",") + 1
    if gpus and gpus < cards:
        unread["CUDA_VISIBLE_DEVICES"] = f"{cards} for {gpus} ranks: a rank on several GPUs is priced as on one"
    unread = {name: why for name, why in unread.items() if name not in settings}
    return KeyedSettings(settings, script, gpus, unread, program)


def _of_python(text: str, calls: re.Pattern[str] | None, given: Settings | None = None) -> KeyedSettings:
    """Keywords of the calls that make a trainer, its arguments and its adapters, and the model that is loaded.

    `given` are values of a command line, which come before the defaults that a program gives its own options.
    """
    tree = parse_python(text, "", "give the script that makes the trainer's arguments")
    names = _names(tree) | {name: ast.Constant(value) for name, value in (given or {}).items()}
    keyed = KeyedSettings({}, Script())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        loads = name.endswith("from_pretrained") and "Model" in name
        is_asked = loads or (calls is not None and calls.search(name))
        keywords = {k.arg: k.value for k in node.keywords if k.arg} if is_asked else {}
        if loads and node.args:
            keywords.setdefault("model_name_or_path", node.args[0])
        if loads and "Fast" in name:
            keyed.settings["use_unsloth"] = True
            if not keywords.keys() & _WIDTHS:
                # as Unsloth loads a model unasked
                keyed.settings["load_in_4bit"] = True
        if is_asked and (learned := _LEARNED.search(name)) is not None:
            keyed.settings["stage"] = learned[1].lower()
        if re.search(r"Lo[Rr][aA]Config$|get_peft_model$", name) and ("r" in keywords or "lora" in name.lower()):
            keyed.settings["peft_type"] = "LORA"
        said = {key: _literal(expression, names) for key, expression in keywords.items()}
        keyed.settings |= {key: value for key, value in said.items() if value is not ...}
        for key in [key for key in said if key not in keyed.settings and key not in _OBJECTS]:
            keyed.unread[key] = f"{ast.unparse(keywords[key])[:80]} (line {keywords[key].lineno})"
    return keyed


_WIDTHS = {"load_in_4bit", "load_in_8bit", "load_in_16bit", "load_in_fp8", "full_finetuning"}
"""Keywords that say how wide the weights are that Unsloth loads."""
_LEARNED = re.compile(r"\b(DPO|KTO|ORPO|CPO|GRPO|RLOO|PPO|Reward|PRM|GKD)(Config|Trainer)$")
"""Calls of TRL that say what is learned, where it is not the next token."""
_OBJECTS = frozenset(table()["huggingface"]["objects"].split())
"""Keywords that take objects whose own settings are read where they are made, or that decide nothing."""


def _names(tree: ast.AST) -> dict[str, ast.expr]:
    """The values that names are assigned, fields have as defaults, and options of argparse have unasked."""
    names: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                names[name] = (_default(value) if isinstance(value, ast.Call) else None) or value
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(option)), *_]):
                if (unasked := _default(node)) is not None:
                    names[option.lstrip("-").replace("-", "_")] = unasked
    return names


def _default(call: ast.Call) -> ast.expr | None:
    """The value of the keyword `default`."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == "default"), None)


_PASSES = r"(os\.)?(getenv|environ\.get) 1|(int|float|str) 0"
"""Calls whose value is their last argument, behind so many: what a variable is where the surroundings set none."""


def _literal(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """A literal, a dtype of torch, or what a name or a field is given; … for anything else."""
    for _ in range(5):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=dtype):
                return dtype
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in names:
                node = names[name]
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = _literal(operand, names)
                return value if value is ... else not value
            case ast.Call() if re.search(r"is_bf(loat)?16_supported$", ast.unparse(node.func)):
                return True
            case ast.Call(args=[*others, last]) if re.fullmatch(_PASSES, f"{ast.unparse(node.func)} {len(others)}"):
                node = last
            case ast.Dict(keys=keys, values=values):
                # what a call makes is read where it is made
                inner = [(key, _literal(value, names)) for key, value in zip(keys, values, strict=True)]
                return {key.value: v for key, v in inner if isinstance(key, ast.Constant) and v is not ...}
    try:
        return literal(node)
    except ValueError:
        return ...


def refuse_unset(name: str, value: Any) -> None:
    """Raise SpecError for a variable that the script leaves to its surroundings."""
    if isinstance(value, str) and (variable := re.fullmatch(r"\$\{(\w+)\}", value)) is not None:
        raise SpecError(f"{name}: ${variable[1]} is not set in the script", f"add --set {variable[1]}=VALUE")


def number(settings: Said, *names: str) -> int | None:
    """The first of the settings that is given, as a whole number. SpecError where it is none."""
    for name in names:
        value = settings.get(name)
        if value not in (None, "", "auto", "null"):
            refuse_unset(name, value)
            try:
                return int(float(str(value)))
            except (TypeError, ValueError, OverflowError):
                raise SpecError(f"{name}: {value!r:.60} is no number", "write a number") from None
    return None


def fraction(settings: Said, name: str, default: float) -> float:
    """A setting between 0 and 1; the default for anything else."""
    value = str(settings.get(name))
    return float(value) if re.fullmatch(r"0?\.\d+|[01](\.0*)?", value) else default


def first(settings: Said, *names: str, default: Any = None) -> Any:
    """The first of the settings that is given, and not empty."""
    return next((settings[name] for name in names if settings.get(name) not in (None, "")), default)


def word(settings: Said, *names: str) -> str:
    """The first of the settings that says something, in small letters."""
    return str(next(filter(None, map(settings.get, names)), "")).lower()


def is_any_on(settings: Said, *names: str) -> bool:
    """True where one of the settings is true."""
    return any(is_on(settings.get(name)) for name in names)


def num_gpus(options: Options, script: Script) -> int | None:
    """GPUs that torchrun, DeepSpeed's launcher or Slurm is asked for; None where none gives a number."""
    directives, variables = script.directives, script.variables

    def said(names: str) -> int | None:
        """The first number that options, directives (with one dash) and variables say."""
        words: list[str] = []
        for name in names.split():
            own = variables.get(name, []) if name[0] != "-" else [directives.get(name[1:], "")]
            words += options.get(name, [])[:1] if name.startswith("--") else own
        return count([word.rpartition(":")[2] for word in words])

    listed = text(options, "--include").partition(" ")[0].rpartition(":")[2]
    seen = listed or next(iter(variables.get("CUDA_VISIBLE_DEVICES", [])), "")
    is_counted = any(name in options for name in ("--nnodes", "--num-nodes"))
    names = {"said": said, "seen": seen, "is_included": bool(listed), "tasks": directives.get("ntasks-per-node")}
    found: int | None = readings("launch", {}, is_counted=is_counted, **names)["num_gpus"]
    return found


def count(values: Sequence[str]) -> int | None:
    """The first of the values that is a positive whole number."""
    return next((int(value) for value in values if is_count(value) and 0 < int(value) < 10**7), None)


_OF_A_VALUE: Fields = {
    "is_on": is_on, "is_off": is_off, "is_count": is_count,
    "is_list": lambda value: isinstance(value, list), "is_mapping": lambda value: isinstance(value, Mapping),
    "is_number": lambda value: type(value) in (int, float), "is_whole": lambda value: type(value) is int,
    "found": lambda mark, said: re.search(mark, str(said)),
}  # fmt: skip
_OF_SETTINGS: Mapping[str, Callable[..., Any]] = {
    "number": number, "fraction": fraction, "first": first, "word": word,
}  # fmt: skip
"""Functions that expressions of readings.yaml know, of a value and of the settings by name."""
_NO_SWITCH = re.compile(r"(?!([Tt]rue|yes|y|[Ff]alse|no|n|[Nn]one|null|off|auto)$)[A-Za-z]+")
"""A word for a switch that is neither of its values."""
_OF_TEXTS = ("names", "wrong", "notes", "refused", "words")
"""Parts of a trainer's readings whose rows are expressions, texts and the words of a key, and no values."""


def readings(trainer: str, settings: Said, /, **more: Any) -> Fields:
    """The parts of a run that a trainer's settings say, by its rows in readings.yaml, which know `more` names too.

    Raises SpecError where a row calls them wrong.
    """
    rows = shipped_table("export/readings.yaml")[trainer]
    of_settings = {name: partial(read, settings) for name, read in _OF_SETTINGS.items()}
    asked: set[str] = set()

    def on(*switches: str) -> bool:
        asked.update(settings.keys() & {*switches})
        return is_any_on(settings, *switches)

    names: Fields = {"settings": settings, "get": settings.get, **_OF_A_VALUE, **of_settings, "on": on, **more}
    for name, expression in rows.get("names", {}).items():
        names[name] = computed(expression, names)
    for row in standing(rows.get("wrong", ()), names):
        raise SpecError(text_of(row["says"], names), text_of(row["hint"], names))
    told = {part: texts_of(rows.get(part, ()), names) for part in ("notes", "refused")}
    found: Fields = filled({part: row for part, row in rows.items() if part not in _OF_TEXTS}, names)
    unclear = {
        key: f"{settings[key]}, read as false" for key in sorted(asked) if _NO_SWITCH.fullmatch(str(settings[key]))
    }
    for key, words in rows.get("words", {}).items():
        if settings.get(key) is not None and not re.fullmatch(words, str(settings[key]), re.IGNORECASE):
            unclear[key] = f"{settings[key]}: none of {words}"
    return found | told | {"unknown": unclear | found.get("unknown", {})}
