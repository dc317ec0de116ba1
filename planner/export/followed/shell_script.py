"""A reader of bash scripts, and of options kept as YAML or JSON, that runs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from planner.errors import SpecError
from planner.export.followed.shell_syntax import ShellBlock, Simple, Statement, parse_shell
from planner.export.followed.shell_words import EACH, Environment, Words, holds
from planner.export.imported_run import ConfigFile, has_line, json_of, yaml_of
from planner.specs.base import Named
from planner.specs.reading import SHELL, shipped_table

Files = Callable[[str], str | None]
"""The text of a file that a script names; None where there is none beside it."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.DOTALL)
_SHELL = shipped_table("export/dialects.yaml")["shell"]
_WORDS = {kind: words.split() for kind, words in _SHELL.items() if kind != "slurm"}
"""Words of bash that declare, that stand before a command, and that launch nothing, whatever comes behind them."""
_FILE, _PARSE = 2**12, 8
"""A file that is read, and a character that is parsed, cost as much as so many that a word makes."""
_MAX_ITERATIONS, _MAX_ROUNDS, _MAX_COUNTED, _MAX_DEPTH, _MAX_COMMANDS = 16, 64, 1_000, 12, 2_000


@dataclass(slots=True)
class Script:
    """The words of the launch, the variables and the Slurm directives of a script."""

    words: list[str] = field(default_factory=list)
    """Words of the launch, with variables put in."""
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Every variable at the launch, or at the end of a script without one; an array has several words."""
    directives: Named = field(default_factory=dict)
    """`#SBATCH --nodes=4` as nodes: 4."""
    commands: list[list[str]] = field(default_factory=list)
    """Words of every command that may launch something, in order."""
    files: Named = field(default_factory=dict)
    """Files that the script writes with cat, and their texts."""
    unset: Named = field(default_factory=dict)
    """Variables that the script does not set, each by the option before it, or by itself where none is."""
    lost: list[list[str]] = field(default_factory=list)
    """Words that bash takes for a command: options behind a comment or an empty line, which ends the one before."""

    unpassed: Named = field(default_factory=dict)
    """The same as settings that nobody reads, and assignments that a comment parts from the command behind it."""


def launched_on(num_gpus: Any) -> Script:
    """A launch of which nothing is known but the number of GPUs, where that is known."""
    return Script(variables={"WORLD_SIZE": [str(num_gpus)]} if num_gpus else {})


def read_shell(text: str, files: Files = lambda name: None) -> Script:
    """Read `text`; unknown variables are empty, and most commands in `$(…)` give nothing."""
    if "\\\n" not in text:  # pasted without the backslashes: no command begins with --
        text = _GOES_ON.sub(r"\1 ", text)
    script = Script()
    reader = _Reader(script, files)
    reader.words.variables["#"] = ["0"]
    reader.job(text)
    reader.block(reader.parsed(text))
    if not any(map(_num_options, script.commands)):
        # a script may write the one that launches
        for inner in [text for text in script.files.values() if has_line(text, r"^\s*--[a-z]")]:
            reader.block(reader.parsed(inner))
    chosen = max(range(len(script.commands)), key=lambda index: _num_options(script.commands[index]), default=None)
    variables = reader.words.variables
    if chosen is not None:
        script.words = script.commands[chosen]
        variables = reader.around[chosen] if _num_options(script.words) else variables
    if script.lost and not _num_options(script.words):
        script.words = max(script.lost, key=len)  # a list of options below a text
        script.lost.remove(script.words)
    alone = re.sub(r"[\\\s]+", " ", "".join(_PARTED.findall(text)))
    told = {
        "bash ends the command before": " ".join(chain(*script.lost)),
        "bash ends the line, and does not pass on": alone.strip(),
        "another training of the script": " ".join(_other_training(script)),
    }
    script.unpassed = {where: words[:200] for where, words in told.items() if words}
    script.words = _behind_srun(script.words, script.directives)
    script.variables = {name: words for name, words in variables.items() if name[0].isalpha()}
    for option, key, name in _BEHIND_OPTION.findall(text):
        if name not in script.variables and (option or key or not AROUND.search(name)):
            script.unset.setdefault(option or key or f"${name}", name)
    return script


_DECIDES = re.compile(r"--?[A-Za-z][\w-]*|(?:\S*=)?(?:\d+|\S+\.(?:py|ya?ml|json))")
"""Words of a command that may decide what it costs: an option, a whole number, a file."""


def _other_training(script: Script) -> list[str]:
    """Words that decide in another command of half as many options or more, and are not in the one that is read."""
    least = max(2.0, _num_options(script.words) / 2)
    others = (words for words in script.commands if words != script.words and _num_options(words) >= least)
    changed = ([word for word in words if word not in script.words and _DECIDES.fullmatch(word)] for words in others)
    return next(filter(None, changed), [])


_OPTION_WORD = r"(?:--[A-Za-z]|\+{0,2}[A-Za-z_]\w*(?:\.\w+)+=)"
_OPTION = re.compile(_OPTION_WORD)
_GOES_ON = re.compile(
    r"^((?:[^#\n]|(?<=\S)#)*[^#\s\\])(?:[ \t]+#[^\n\"']*|[ \t]*)\n(?:[ \t]*#[^\n]*\n)*(?=[ \t]*" + _OPTION_WORD + ")",
    re.MULTILINE,
)
"""A line, with its comment and those below it, that is followed by one of options."""
_PARTED = re.compile(r"^((?:[ \t]*[A-Za-z_]\w*=\S*[ \t]*\\\n)+)[ \t]*#", re.MULTILINE)
"""Lines of assignments that go on to a comment."""
_BEHIND_OPTION = re.compile(
    r"(?:(--[A-Za-z][\w-]*)[ =]+|(?<![\w.])([A-Za-z_]\w*(?:\.\w+)+)=|^[ \t]+)"
    r"[\"']?\$\{?([A-Za-z_]\w*)(?:\[[@*]\]|:?\?[^}]*)?\}?[\"']?(?=\s|$)",
    re.MULTILINE,
)
AROUND = re.compile(
    r"RANK|MASTER|HOST|ADDR|PORT|NODE|HOME|PATH|DIR|ROOT|DATA|LOG|NAME|WANDB|TOKEN|CKPT|SAVE|LOAD|TENSORBOARD|FILE|USER|PWD"
    r"|SLURM|SCRIPT|URL|KEY|ENV|EVAL|TRAIN_ITERS|SEED|LR|STEPS|ITERS|OUTPUT|PROMPT|EXP|PROJECT|CACHE|DATE|TIME",
    re.IGNORECASE,
)
"""Names of variables that say where a run is and what it reads, not how it is laid out."""


_PROGRAM = re.compile(
    r"(\S*/)?(python[\d.]*|torchrun|deepspeed|accelerate|(ba)?sh|uv|llamafactory-cli|swift|megatron|axolotl)"
)


def _behind_srun(words: list[str], directives: Named) -> list[str]:
    """The words of the program that srun starts; its own words are directives, as those of a script are."""
    begin = words.index("srun") if "srun" in words else len(words)
    end = next((at for at in range(begin + 1, len(words)) if _PROGRAM.fullmatch(words[at])), None)
    if end is None:
        return words
    said = _directives(f"#SBATCH {' '.join(words[begin + 1 : end])}")
    directives |= {name: value for name, value in said.items() if value}
    if words[end] == "deepspeed" and not any(word.startswith(("--hostfile", "--num_nodes")) for word in words):
        # each node starts a job of its own GPUs, as the launcher knows no other
        directives |= {"nodes": "1", "N": "1"}
    return words[end:]


_TRAINS_BY_FILE = re.compile(r"\b(llamafactory-cli|axolotl|swift|tune|trl|megatron) \w.*\.ya?ml\b")
_NO_TRAINING = re.compile(
    r"(^|/|-m |run |launch )(lm[-_]eval|lighteval|evalplus|vllm|sglang)\b"
    r"|[/_ ](eval|infer|generate|convert|merge|export|preprocess|prepare|upload|download)\w*\.py\b"
)


def _num_options(words: list[str]) -> float:
    """Options and overrides of a command, which the one that trains has most of; an evaluation's count little."""
    said, options = " ".join(words), sum(_OPTION.match(word) is not None for word in words)
    return options / 100 if _NO_TRAINING.search(said) else options + (_TRAINS_BY_FILE.search(said) is not None)


_ASKED = {
    "nodes": re.compile(r"^#(?:PBS\s+-l\s+select=|BSUB\s+-nnodes\s+)(\d+)", re.MULTILINE),
    "gpus-per-node": re.compile(r"^#(?:PBS\s+-l\s+select=\S*?:ngpus=|BSUB\s+-gpu.*?\bnum=)(\d+)", re.MULTILINE),
}
"""Nodes, and GPUs of each, as PBS and LSF are asked for them, by Slurm's names."""


def _directives(text: str) -> Named:
    """Options of the lines that begin with #SBATCH; nodes and GPUs of PBS's and LSF's as Slurm calls them."""
    directives = {name: said[1] for name, mark in _ASKED.items() if (said := mark.search(text)) is not None}
    for line in re.findall(r"^#SBATCH[ \t]+(.+?)[ \t]*(?:#.*)?$", text, re.MULTILINE):
        for name, value in re.findall(r"--?([A-Za-z][\w-]*)(?:[=\s]+([^\s-]\S*))?", line):
            directives[name] = value
    return directives


class _Reader:
    """Follows statements, and puts what it reads into a script."""

    def __init__(self, script: Script, files: Files) -> None:
        self.script, self.files = script, files
        self.words = Words(outcome=self._outcome)
        self.functions: dict[str, ShellBlock] = {}
        self.depth = 0
        self.around: list[Environment] = []
        """The variables at each command of the script."""
        self.started: set[str] = set()
        """Scripts that were followed: a sweep starts one many times, and its first time tells."""

    def parsed(self, text: str) -> ShellBlock:
        """The statements of a text. Raises SpecError for one longer than any launch script."""
        if len(text) > SHELL.num_bytes:
            raise SpecError(f"a script of {len(text):,} characters is no launch script", "give the one that launches")
        self.words.spend(_PARSE * len(text))
        return parse_shell(text)

    def job(self, text: str) -> None:
        """Keep the directives of a script's text, under those of the script that starts it."""
        self.script.directives = directives = _directives(text) | self.script.directives
        for variable, asked in _SHELL["slurm"].items():
            said = next(filter(None, map(directives.get, asked.split())), "").rpartition(":")[2]
            if said.isdigit():
                self.words.variables[variable] = [said]

    def block(self, block: ShellBlock) -> bool | None:
        """Follow statements; true or false as the last one's status, None where only a machine knows it."""
        status: bool | None = True
        for connector, statement in block.statements:
            if (connector == "&&" and status is False) or (connector == "||" and status is not False):
                continue
            status = self._statement(statement)
        return status

    def _statement(self, statement: Statement) -> bool | None:
        if self.depth >= _MAX_DEPTH:
            return None
        self.depth += 1
        self.words.spend(EACH)
        try:
            return self._followed(statement)
        finally:
            self.depth -= 1

    def _followed(self, statement: Statement) -> bool | None:
        if isinstance(statement, Simple):
            return self._simple(statement)
        if isinstance(statement, ShellBlock):
            return self.block(statement)
        words, body = statement.words, statement.bodies[-1] if statement.bodies else ShellBlock()
        match statement.kind:
            case "if":
                held = (
                    inner
                    for when, inner in zip(statement.conditions, statement.bodies, strict=False)
                    if self.block(when)
                )
                return self.block(next(held, body))
            case "case":
                value = self.words.text(words[0])
                for patterns, inner in zip(statement.patterns, statement.bodies, strict=True):
                    if any(holds(["[[", value, "==", self.words.text(known), "]]"], self.words) for known in patterns):
                        return self.block(inner)
            case "count":
                self._count(words, body)
            case "for":
                values = [word for raw in words[1:] for each in _counted(raw) for word in self.words.expand(each)]
                for value in values[:_MAX_ITERATIONS]:
                    self.words.variables[words[0]] = [value]
                    self.block(body)
            case "while" | "until":
                # of options that are shifted away; a round that changes nothing is the last
                before: Environment = {}
                for _ in range(_MAX_ROUNDS):
                    if before == self.words.variables or self.block(statement.conditions[0]) is not (
                        statement.kind == "while"
                    ):
                        break
                    before = dict(self.words.variables)
                    self.block(body)
            case "function":
                self.functions[words[0]] = body
        return True

    def _count(self, words: list[str], body: ShellBlock) -> None:
        """Follow `for ((i=0; i<N; i++))`."""
        begin, condition, step = ([*map(str.strip, " ".join(words).split(";")), "", "", ""])[:3]
        self.words.counted(begin)
        for _ in range(_MAX_COUNTED):
            if not self.words.counted(condition):
                break
            self.block(body)
            self.words.counted(step)

    def _simple(self, command: Simple) -> bool | None:
        """Keep assignments; collect the words of anything else. The status of a test is known, of a program never."""
        raw = list(command.words)
        while raw and (match := _ASSIGNMENT.match(raw[0])):
            self._assign(match, raw.pop(0))
        if not raw:
            return True
        if raw[0] in ("[", "[[", "test", "(("):
            return holds(raw, self.words)
        if raw[0] in _WORDS["declaring"]:
            for word in raw[1:]:
                if match := _ASSIGNMENT.match(word):
                    self._assign(match, word)
            return True
        if raw[0] == "!":
            status = self._simple(replace(command, words=raw[1:]))
            return None if status is None else not status
        words = [word for part in raw for word in self.words.expand(part)]
        return self._command(words, command) if words else True

    def _command(self, words: list[str], command: Simple) -> bool | None:
        while words and words[0] in _WORDS["before"]:
            words = words[1:]
            while words and _ASSIGNMENT.match(words[0]):
                words = words[1:]
        name = words[0] if words else ""
        if name in self.functions:
            return self._call(words)
        here = command.here
        if here is not None and not command.here_is_literal:
            here = " ".join(self.words.quoted(here))
        if name in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif name == "shift":
            self._arguments(
                self.words.variables.get("@", [])[int(words[1]) if words[1:] and words[1].isdigit() else 1 :]
            )
        elif name == "eval":
            self._inner(" ".join(words[1:]), [])
        elif name == "printf" and words[1:2] == ["-v"] and len(words) > 3:
            self.words.variables[words[2]] = [_printed(words[3], words[4:])]
        elif name == "read" and here is not None:
            self._read(words[1:], here)
        elif name in ("cat", "tee", "echo") and (here is not None or (name == "echo" and command.output)):
            target = " ".join(words[1:2]) if name == "tee" else self.words.text(command.output or "").strip()
            self.script.files[target] = " ".join(words[1:]) if here is None else here
        elif name in ("true", ":", "false"):
            return name != "false"
        elif name and name not in _WORDS["says_only"] and len(self.script.commands) < _MAX_COMMANDS:
            self._collect(words)
        return None if name not in _WORDS["says_only"] else True

    def _read(self, words: list[str], text: str) -> None:
        """Set the variables of `read`, the last one to all that is left; IFS parts them."""
        names, marks = [word for word in words if word.isidentifier()], "".join(self.words.variables.pop("IFS", []))
        is_array = any(re.fullmatch(r"-\w*a", word) for word in words)
        most = 0 if is_array else len(names) - 1
        parts = re.split(rf"[{re.escape(marks)}]" if marks.strip() else r"\s+", text.strip(), maxsplit=most)
        values = [parts] if is_array else [[part] for part in parts] if most else [[text]]
        self.words.variables |= dict(zip(names, values, strict=False))

    def _collect(self, words: list[str]) -> None:
        """Keep a command's words; of one that starts another, in a word or in a script, that one's behind its own."""
        for index, word in enumerate(words):
            by_shell = index > 0 and _STARTS.fullmatch(words[index - 1]) is not None
            text, before, arguments = None, words[: index - by_shell], words[index + 1 :]
            if word.startswith("--wrap="):
                text, before = word.removeprefix("--wrap="), []
            elif by_shell and arguments and re.fullmatch(r"-\w*c", word):
                text, arguments = arguments[0], arguments[2:]
            elif word.endswith(_SCRIPTS) and word not in self.started and (by_shell or before[:1] in _BEFORE):
                text = self.script.files.get(word) or self.files(word)
                self.started.add(word)
                self.job(f"{text}\n#SBATCH {' '.join(before[1:])}")
            if text is not None:
                self.words.spend(_FILE)
                self._inner(text, before, arguments)
                return
        flat = []
        for word in words:
            # one array item may hold an option and its value
            flat += word.split() if re.match(r"\s*--\w[\w-]*\s+\S", word) else [word]
        if self.script.commands and _OPTION.match(flat[0]):
            self.script.lost.append(flat)
            return
        self.script.commands.append(flat)
        self.around.append(dict(self.words.variables))

    def _inner(self, text: str, before: list[str], arguments: Sequence[str] = ()) -> None:
        """A command line inside a word; `before` launches it, and its options count too."""
        first, outer = len(self.script.commands), self._arguments(arguments)
        self._statement(self.parsed(text))
        self.words.variables |= outer
        for index in range(first, len(self.script.commands)):
            self.script.commands[index] = [*before, *self.script.commands[index]]

    def _call(self, words: list[str]) -> bool | None:
        outer = self._arguments(words[1:])
        status = self.block(self.functions[words[0]])
        self.words.variables |= outer
        return status

    def _arguments(self, arguments: Sequence[str]) -> Environment:
        """Set `$@`, `$#`, `$1` and so on; what they were before."""
        self.words.spend(len(arguments))
        given: Environment = {"@": [*arguments], "*": [*arguments], "#": [str(len(arguments))]}
        given |= {str(i): [*arguments[i - 1 : i]] for i in range(1, 10)}
        outer = {name: self.words.variables.get(name, []) for name in given}
        self.words.variables |= given
        return outer

    def _source(self, name: str) -> None:
        if (text := self.files(name)) is not None:
            self.words.spend(_FILE)
            self._statement(self.parsed(text))

    def _assign(self, match: re.Match[str], raw: str) -> None:
        """Keep `A=1`, `A+=1`, `A=(1 2)` or `A[0]=1`."""
        name, index, adds, rest = match[1], match[2], match[3], raw[match.end() :]
        before = self.words.variables.get(name, [])
        if rest.startswith("("):
            inner = re.sub(r"(?m)(^|[ \t])#.*$", r"\1", rest[1:-1])
            value = self._expanded(inner.replace("\n", " \\\n"))
            self.words.spend(len(before) if adds else 0)
            self.words.variables[name] = [*before, *value] if adds else value
            return
        text = self.words.text(rest)
        if index is not None:
            number = self.words.arithmetic(index.strip("[]"))
            self.words.spend(len(before))
            array = [*before, *[""] * max(0, min(number or 0, 1_000) + 1 - len(before))]
            array[min(number or 0, 1_000)] = text
            self.words.variables[name] = array
        else:
            self.words.spend(sum(map(len, before)) if adds else 0)
            self.words.variables[name] = [" ".join(before) + text if adds else text]

    def _outcome(self, command: str) -> str | None:
        """The output of a command that prints what it is given; None for any other."""
        command = _SPACED.sub("", command)
        if (choice := _CHOICE.fullmatch(command.strip())) is not None:
            return self._outcome(choice[2 if holds(choice[1].split(), self.words) else 3])
        *before, command = [part.strip() for part in command.split(";")]
        if before:
            return self._subshell(before, command)
        [name, said] = [*command.split(None, 1), "", ""][:2]
        match name if said else "":
            case "seq":
                return _sequence(self._expanded(said))
            case "printf":
                form, *values = self._expanded(said) or [""]
                return _printed(form, values)
            case "echo" if "|" not in said:
                return " ".join(self.words.expand(said))
            case "expr":
                value = self.words.arithmetic(said.replace("\\*", "*"))
                return None if value is None else str(value)
            case "basename":
                return self.words.text(said.split()[0]).rpartition("/")[2]
        return "" if name in ("", "echo") and not said else None

    def _expanded(self, text: str) -> list[str]:
        """The words of a text that has several."""
        items = [word for _, part in self.parsed(text).statements if isinstance(part, Simple) for word in part.words]
        return [word for item in items for word in self.words.expand(item)]

    def _subshell(self, before: list[str], command: str) -> str | None:
        """The output of `$(A=1; command)`, whose assignments hold in it alone."""
        outer = dict(self.words.variables)
        for part in before:
            if (match := _ASSIGNMENT.match(part)) is None:
                return None
            self._assign(match, part)
        output = self._outcome(command)
        self.words.variables = outer
        return output


_STARTS, _SCRIPTS = re.compile(r"(\S*/)?((ba|z|da)?sh|sbatch|qsub)"), (".sh", ".bash", ".slurm", ".sbatch", ".job")
"""Commands that start a script, and the ends of its name."""
_BEFORE: tuple[list[str], ...] = ([], ["sbatch"], ["srun"], ["qsub"])
"""The first word before a script that its command starts."""
_CHOICE = re.compile(r"(\[.*\])\s*&&\s*(.*?)\s*\|\|\s*(.*)")
_SPACED = re.compile(r"\s*\|\s*(?:tr '\\n' ' '|sed 's/ +\\\+/ /g'|xargs)(?=\s*(?:\||$))")
"""Commands behind a pipe that change nothing but the white space between words."""


def _printed(form: str, values: list[str]) -> str:
    """The text that printf makes of its values: the form is used again while some are left."""
    holes = len(re.findall(r"%[sdq]", form))
    rounds = [values[at : at + holes] for at in range(0, max(len(values), 1), holes)] if holes else [[]]
    made = []
    for each in rounds[:_MAX_COUNTED]:
        rest = iter(each)
        made.append(re.sub(r"%[sdq]", lambda _: next(rest, ""), form))  # noqa: B023
    return "".join(made)


def _sequence(bounds: list[str]) -> str | None:
    """The numbers of `seq FIRST STEP LAST`."""
    if not 1 <= len(bounds) <= 3 or not all(re.fullmatch(r"-?\d{1,6}", bound) for bound in bounds):
        return None
    first, step, last = {1: (1, 1, int(bounds[-1]))}.get(len(bounds), (int(bounds[0]), 1, int(bounds[-1])))
    step = int(bounds[1]) if len(bounds) == 3 else step
    return None if not step else " ".join(map(str, [*range(first, last + 1, step)][:_MAX_COUNTED]))


def _counted(raw: str) -> list[str]:
    """`{1..4}` as its numbers; any other word as it is."""
    match = re.fullmatch(r"\{(\d{1,6})\.\.(\d{1,6})\}", raw)
    return [raw] if match is None else (_sequence([*match.groups()]) or "").split()


def read_script(config: ConfigFile) -> Script:
    """Options as YAML or JSON where the text is that, else the words of a bash script; what it writes is beside it."""
    script = _options_file(config.text) or read_shell(config.text, config.beside)
    config.written.update(script.files)
    return script


def _options_file(text: str) -> Script | None:
    """Megatron's `MODEL_ARGS:`, a mapping of options, or a list of words; None for any other text."""
    if not has_line(text, r"^\s*(MODEL_ARGS:|\{|\[)") or text.startswith("#!"):
        return None
    try:
        data = json_of(text, "") if text.lstrip()[:1] in "{[" else yaml_of(text, "")
    except SpecError:
        return None
    if isinstance(data, list):
        return Script(words=[str(word) for word in data])
    if not isinstance(data, dict):
        return None
    options, script = data.get("MODEL_ARGS") or data.get("args") or data, launched_on(data.get("world_size"))
    if isinstance(options, list):
        script.words = [str(word) for word in options]
    elif isinstance(options, dict):
        script.words = [word for option, value in options.items() for word in _words(str(option), value)]
    else:
        return None
    return script


def _words(option: str, value: Any) -> list[str]:
    """An option and its value as words of a command line; true is a bare flag, false and null are none."""
    option = option if option.startswith("-") else f"--{option if '.' in option else option.replace('_', '-')}"
    if value is False or value is None:
        return []
    if value is True:
        return [option]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [option, str(value)]
