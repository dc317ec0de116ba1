"""Scripts and recipes of a few hundred bytes that ask for gigabytes or for hours: following them ends, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import SpecError
from planner.export.followed import python_recipe, shell_words
from planner.export.followed.python_recipe import Evaluator
from planner.export.followed.python_values import Unknown
from planner.export.followed.shell_script import read_shell
from planner.export.import_run import read, read_configuration
from planner.export.imported_run import ConfigFile

MEGATRON = (
    "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --num-experts 8 "
)
NESTED_LOOPS = "".join(f"for a{depth} in {'x ' * 16}; do " for depth in range(11)) + "A= " + "; done" * 11
SIXTEEN = "A=" + "x" * 16 + "\n" + "A=$A$A$A$A\n" * 7


@pytest.mark.parametrize(
    "script",
    [
        "A=x\n" + "A=$A$A\n" * 60,
        "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60,
        NESTED_LOOPS,
        "f() { f; f; f; }\nf\n",
        "f() { for i in 1 2 3 4 5 6 7 8; do f; done; }\nf\n",
        SIXTEEN + "B=${A#*y}\n",
        SIXTEEN + "B=${A%%*y}\n",
        SIXTEEN + "B=${A//x/$A}\n",
        SIXTEEN + "B=$((" + "A+" * 1000 + "1))\n",
        "cat <<a\na\n" * 20_000,
        "A[1000]=1\n" * 20_000,
    ],
    ids=range(11),
)
def test_a_script_that_grows_without_end_is_refused(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_words, "_MAX_CHARACTERS", 1_000_000)  # a quarter of what is allowed
    with pytest.raises(SpecError, match="more than 1,000,000 characters") as caught:
        read_shell(script)
    assert caught.value.hint


@pytest.mark.parametrize(
    "expression",
    ["9**9**9**9", "1<<99999999999", "9" * 100_000, "-" * 3_000 + "1", "(" * 3_000 + "1", "'t'*9999999999", "1/0"],
)
def test_arithmetic_beyond_a_script_is_not_known(expression: str) -> None:
    assert read_shell(f"B=$(({expression}))").variables["B"] == [""]


def test_arithmetic_that_squares_itself_ends_at_the_largest_number() -> None:
    assert read_shell("A=99999999999\n" + "A=$((A*A))\n" * 200).variables["A"] == [""]


@pytest.mark.parametrize("pattern", ["(a+)+$", "a*a*a*a*b", "(a|a)*b", "[", "a{99999999}"])
def test_a_pattern_that_may_take_hours_is_not_tried(pattern: str) -> None:
    script = read_shell(f"if [[ {'a' * 90} =~ {pattern} ]]; then A=met; else A=unmet; fi")
    assert script.variables["A"] == ["unmet"]


def test_a_plain_pattern_is_tried() -> None:
    assert read_shell("if [[ node017 =~ ^node[0-9]+$ ]]; then A=met; fi").variables["A"] == ["met"]


def test_files_that_source_each_other_many_times_end(tmp_path: Path) -> None:
    for number in range(11):
        (tmp_path / f"s{number}.sh").write_text(f"source s{number + 1}.sh\n" * 16)
    (tmp_path / "s11.sh").write_text("A=1\n")
    with pytest.raises(SpecError, match="more than 4,000,000 characters"):
        read(tmp_path / "s0.sh", "megatron")


@pytest.mark.parametrize(
    "option",
    [
        "--moe-layer-freq '([0]*9999999999+[1]*9999999999)'",
        "--moe-layer-freq '" + "(" * 500 + "'",
        "--pipeline-model-parallel-layout 't*9999999999'",
        "--pipeline-model-parallel-layout 'E((((t|)*999)*999)*999)*999L'",
        "--tensor-model-parallel-size 0",
        "--tensor-model-parallel-size " + "9" * 5_000,
        "--num-layers 1e999",
    ],
)
def test_an_option_out_of_range_is_refused_in_a_short_line(option: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_configuration(MEGATRON + option)
    assert caught.value.hint
    assert len(caught.value.message) < 400


def value_of(body: str) -> object:
    """The value that a function with this body returns, followed and not run."""
    lines = "".join(f"  {line}\n" for line in body.splitlines())
    return Evaluator(ConfigFile(f"def recipe():\n{lines}")).call("recipe")


@pytest.mark.parametrize(
    "body",
    [
        "return 9**9**9**9",
        "return 1 << 10**18",
        "return 'a' * 10**18",
        "return [0] * 10**18",
        "return int('9' * 4096)",
        "x = [1]\n" + "x = [x, x]\n" * 40 + "return str(x)",
        "x = [1]\ny = [1]\n" + "x = [x, x]\ny = [y, y]\n" * 40 + "return x == y",
        "s = 'a' * 4000\nreturn s.replace('a', s)",
    ],
    ids=range(8),
)
def test_a_value_that_no_configuration_has_is_not_known(body: str) -> None:
    assert isinstance(value_of(body), Unknown)


@pytest.mark.parametrize(
    "body",
    [
        "for a in range(4096):\n for b in range(4096):\n  for c in range(4096):\n   x = 1",
        "y = []\nx = [0] * 4096\nfor a in range(4096):\n for b in range(99):\n  y.append(x + x)",
        "d = {}\nfor a in range(4096):\n d[a] = d | {a: 1}",
        "x = [a for a in range(4096) for b in range(4096) if a > 9999]\nfor a in range(9):\n y = 1",
        "recipe()\nrecipe()\nreturn recipe()",
    ],
    ids=range(5),
)
def test_a_recipe_that_goes_on_without_end_is_refused(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_recipe, "MAX_STEPS", 20_000)  # a tenth of what is allowed
    with pytest.raises(SpecError, match="more than 20,000 steps"):
        value_of(body)


def test_a_record_in_two_places_is_copied_once() -> None:
    copy = value_of("x = R(a=1)\n" + "x = R(a=x, b=x)\n" * 40 + "return deepcopy(x)")
    assert copy.get("a") is copy.get("b")  # type: ignore[attr-defined]
    assert copy.get("a" + ".a" * 40) == 1  # type: ignore[attr-defined]


def test_presets_that_extend_each_other_many_times_are_read_once_each(tmp_path: Path) -> None:
    from planner.export.primus_reading import preset

    folder = tmp_path / "primus" / "configs" / "models" / "megatron"
    folder.mkdir(parents=True)
    for number in range(40):
        (folder / f"m{number}.yaml").write_text(f"extends: [m{number + 1}.yaml, m{number + 1}.yaml]\nk{number}: 1\n")
    (folder / "m40.yaml").write_text("last: 2\n")
    tree = preset(ConfigFile("", tmp_path / "experiment.yaml"), "models", "megatron", "m0")
    assert tree is not None
    assert (tree["k0"], tree["k39"], tree["last"]) == (1, 1, 2)
