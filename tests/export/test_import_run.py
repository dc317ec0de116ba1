"""`read` and `plan import` read files as they say, and refuse what is no trainer's configuration.

Scripts and recipes of a few hundred bytes that ask for gigabytes or for hours: following them ends, and says why.
Shell scripts are read and never run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refused
from samples import BASE, SCRIPT, example_of, layout_of
from tables import beside

from planner.cli import main
from planner.errors import SpecError
from planner.export.followed import python_recipe, shell_words
from planner.export.followed.python_recipe import Evaluator
from planner.export.followed.python_values import Unknown
from planner.export.followed.shell_script import read_shell
from planner.export.import_run import read, read_configuration
from planner.export.imported_run import ConfigFile
from planner.export.megatron.keyed_reading import options_of_keys
from planner.layout.runs import parse_run

TABLES = beside(__file__)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *TABLES["what_cannot_be_read"],
        (f"p.py {BASE} --tensor-model-parallel-size x", "'x' is no number"),
        (f"p.py {BASE} --num-experts 4 --moe-layer-freq '([1]*31+many)'", "is no list of layers"),
        ('{"overrides": ["a"], ' + '{"a":' * 50_000, "not JSON"),
        ("model:\n  a: " + "[" * 5_000 + "\ntrain:\n  global_batch_size: 8\n", "not YAML"),
        ("trainer:\n  devices: " + "[" * 5_000 + "\nmodel:\n  a: 1\n", "not YAML"),
        (f"p.py {BASE} --tensor-model-parallel-size ${{TP:?need}}", "$TP is not set"),
        (f"p.py {BASE} --prompt-file x", "this is an inference server"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(
        SpecError, match=message.replace("(", r"\(").replace("$", r"\$").replace("[", r"\[").replace("+", r"\+")
    ):
        read_configuration(text)


@pytest.mark.parametrize(("text", "place", "value"), TABLES["what_decides_is_read_or_named"])
def test_what_decides_is_read_or_named(text: str, place: str, value: Any) -> None:
    imported = read_configuration(text)
    found: Any = {name: getattr(imported, name) for name in ("run", "unknown", "refused", "assumed", "pads")}
    for name in place.split("/"):
        found = found.get(name)
    assert found == value


def test_none_is_a_word_of_some_options() -> None:
    assert options_of_keys({"moe_router_load_balancing_type": "none", "fp8": "none"}) == {
        "--moe-router-load-balancing-type": ["none"]
    }


def test_a_broken_file_beside_the_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"min_num_params": ')
    launch = tmp_path / "run.sh"
    launch.write_text("torchrun run_clm.py --per_device_train_batch_size 1 --fsdp full_shard --fsdp_config fsdp.json")
    with pytest.raises(SpecError, match="not JSON"):
        read(launch)


def test_a_recipe_of_a_file_without_functions_is_an_error() -> None:
    with pytest.raises(SpecError, match="--recipe: 'llama3_405b': the file has no functions"):
        read_configuration(SCRIPT, recipe="llama3_405b")


def test_the_example_of_the_docstring(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pretrain.sh").write_text(SCRIPT)
    names: dict[str, Any] = {}
    exec(example_of(read), names)
    assert capsys.readouterr().out.startswith("megatron {'tp': 4,")
    run = parse_run({"run": names["run"]})
    assert (run.model.name, run.cluster.num_gpus, run.parallelism.tp) == ("llama-3.1-70b", 64, 4)


def test_the_trainer_may_be_named() -> None:
    script = "torchrun -m torchtitan.train --parallelism.tensor_parallel_degree 2"
    assert read_configuration(script).source == "torchtitan"
    assert read_configuration(script, "torchtitan").source == "torchtitan"
    assert read_configuration(f"# planned for torchtitan\np.py {BASE}").source == "megatron"
    with pytest.raises(SpecError, match="passes no Megatron-LM arguments"):
        read_configuration(script, "megatron")
    with pytest.raises(SpecError, match="'pax' is unknown") as caught:
        read_configuration(script, "pax")
    assert {"megatron", "verl", "neox"} <= {*re.findall(r"\w+", caught.value.hint or "")}


def test_added_fields_replace_those_that_were_read() -> None:
    imported = read_configuration('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}')
    given = {"model": "llama-2-13b", "hardware": "h100", "seq_length": 4096}
    assert imported.complete(num_gpus=32, tp=2, **given)["parallelism"]["tp"] == 2
    assert "dp" not in imported.complete(num_gpus=32, **given)["parallelism"], "16 in the file, found again for 32 GPUs"
    assert imported.run["parallelism"]["dp"] == 16


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "run.sh").write_text(SCRIPT)
    return str(tmp_path / "run.sh")


def test_the_command_prices_and_compares(script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "run.jsonl")
    assert main(["import", script, "--json", "-o", saved]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["unknown"] == {"--brand-new-switch": "7"}
    assert "warning: not understood: --brand-new-switch 7" in captured.err
    assert answer["evaluated"]["model"]["name"] == "llama-3.1-70b", "known by its sizes"
    assert [stage["num_layers"] for stage in answer["evaluated"]["best"]["stages"]] == [19, 20, 20, 21]
    assert answer["own"]["step"]["step_s"] <= answer["evaluated"]["best"]["step"]["step_s"]
    assert answer["why"]
    assert main(["evaluate", "--runs", saved, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["step"]["step_s"] == answer["evaluated"]["best"]["step"]["step_s"]


def test_the_command_for_eyes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", script, "--no-search"]) == 0
    out = capsys.readouterr().out
    assert "TP 4 × PP 4 × DP 8" in out
    assert "Not understood" in out
    assert "--brand-new-switch 7" in out


def test_examples_that_are_padded_take_a_shorter_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(
        "swift sft --model Qwen/Qwen3-0.6B --max_length 4096 --per_device_train_batch_size 2"
    )
    asked = ["import", str(tmp_path / "run.sh"), "--gpus", "2", "--no-search", "--json", "-q"]
    assert main([*asked, "--example-lengths", "300:2048"]) == 0
    answer = json.loads(capsys.readouterr().out)
    mean_ms = float(re.findall(r"takes ([\d.]+) ms in the mean", " ".join(answer["notes"]))[0])
    assert (answer["run"]["batching"], answer["run"]["seq_length"]) == ("padded", 2048), "no batch is as long as 4096"
    assert mean_ms < 800 * answer["evaluated"]["best"]["step"]["step_s"]


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\0\1")
    assert main(["import", str(tmp_path / "binary")]) == 2
    assert main(["import", str(tmp_path / "missing")]) == 2
    err = capsys.readouterr().err
    assert "is no configuration" in err
    assert "no such file" in err


def test_deepspeed() -> None:
    config = {
        "train_batch_size": 512, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 8},
        "optimizer": {"type": "AdamW"}, "curriculum_learning": {"enabled": True},
    }  # fmt: skip
    imported = read_configuration(json.dumps(config))
    assert imported.source == "deepspeed"
    assert layout_of(imported)["dp"] == 64
    assert "fsdp" not in layout_of(imported)
    assert imported.run["dtype"] == "fp16"
    assert set(imported.unknown) == {"zero_optimization.zero_hpz_partition_size", "curriculum_learning"}
    assert imported.run["features"]["parameter_offload"] is True
    with pytest.raises(SpecError, match="model is not in the configuration"):
        imported.complete()


CORPUS = Path(__file__).parents[1] / "fuzzing" / "corpus"
TOML = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\n{}\n[parallelism]\npipeline_parallel_degree = 2\n'
RECIPE = TABLES["recipe"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *TABLES["values_that_are_no_counts"],
        (TOML.format("local_batch_size = inf"), "training.local_batch_size: inf is no whole number"),
        (TOML.format('seq_len = "long"'), "training.seq_len: 'long' is no whole number"),
        (TOML.format("seq_len = 0"), "training.seq_len: 0 is below 1"),
        (f"--num-layers 2 --hidden-size 8 --num-attention-heads {'x' * 999}", "--num-attention-heads: 'xxx"),
    ],
)
def test_values_that_are_no_counts(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_configuration(text)
    assert message in caught.value.message
    assert len(caught.value.lines()) < 400
    assert caught.value.hint


@pytest.mark.parametrize("digits", ["²", "٣", "9" * 5000])
def test_digits_that_are_no_number_for_python_count_nothing(digits: str) -> None:
    sizes = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 64 --micro-batch-size 1"
    script = f"NGPU={digits}\nWORLD_SIZE={digits}\npretrain_gpt.py {sizes} --nnodes {digits}"
    assert read_configuration(script).run["num_gpus"] is None


@pytest.mark.parametrize("targets", ["7", "true", "{a: 1}", "[q_proj, 7]"])
def test_targets_of_adapters_that_are_no_names(targets: str) -> None:
    text = f"base_model: meta-llama/Llama-3.1-8B\nadapter: lora\nmicro_batch_size: 1\nlora_target_modules: {targets}\n"
    imported = read_configuration(text + f"target_parameters: {targets}\n")
    assert imported.run["adapters"]["targets"] == (["q_proj"] if "q_proj" in targets else ["all-linear"])
    assert imported.unknown["target_modules"]


def test_a_rank_without_end_is_no_rank() -> None:
    with pytest.raises(SpecError, match=r"r: inf is no number"):
        read_configuration("base_model: x\nadapter: lora\nmicro_batch_size: 1\nlora_r: .inf\n")


def test_a_model_without_a_vocabulary_is_asked_for_one() -> None:
    lines = (CORPUS / "torch" / "plan.torch.yaml").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("#", "  vocab_size:")))
    with pytest.raises(SpecError, match="vocab_size is not in the configuration"):
        read_configuration(text).complete(hardware="h100")


def test_a_micro_batch_of_none_is_no_division() -> None:
    text = TOML.format("local_batch_size = 8") + "pipeline_parallel_microbatch_size = 0\n"
    with pytest.raises(SpecError, match="micro-batch: 0 is below 1"):
        read_configuration(text)


@pytest.mark.parametrize("statement", ["raise ValueError", "break", "return 1"])
def test_a_recipe_is_read_to_where_its_file_ends_itself(statement: str) -> None:
    """What stands behind it is no part of the file that a run would see."""
    with pytest.raises(SpecError, match="no function of the file returns a recipe"):
        read_configuration(RECIPE.format(statement))
    assert read_configuration(RECIPE.format("")).run["parallelism"]["tp"] == 4


def test_an_import_from_above_all_folders_is_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE.format(f"from {'.' * 30} import common"))
    assert read(tmp_path / "recipe.py").run["parallelism"]["tp"] == 4


def test_stages_on_ranks_below_0_are_refused() -> None:
    text = (CORPUS / "torch" / "plan.torch.yaml").read_text()
    negative = re.sub(r"stage_to_rank:.*?\n(?=\w)", "stage_to_rank: [-1, -3]\n", text, flags=re.DOTALL)
    assert negative != text
    with pytest.raises(SpecError, match="names no rank"):
        read_configuration(negative)


@pytest.mark.parametrize(("text", "variables", "asked"), TABLES["a_variable_of_the_surroundings_is_asked_for"])
def test_a_variable_of_the_surroundings_is_asked_for(
    tmp_path: Path, text: str, variables: dict[str, str], asked: str
) -> None:
    path = tmp_path / "launch.sh"
    path.write_text(f"torchrun pretrain_gpt.py --vocab-size 512 --max-position-embeddings 512 {text}")
    if asked:
        with pytest.raises(SpecError) as caught:
            read(path)
        assert f"--set {asked}=" in (caught.value.hint or "")
    else:
        assert read(path, variables=variables).run["seq_length"] == 512


def test_what_would_decide_the_layout_is_refused_by_name() -> None:
    script = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 512"
    imported = read_configuration(f"{script} --vocab-size 512 --max-position-embeddings 512 --tensor-parallel-ranks 4")
    with pytest.raises(SpecError, match="--tensor-parallel-ranks 4 is not understood"):
        imported.complete(hardware="h100", num_gpus=8)


def test_an_unknown_setting_is_priced_as_what_it_could_say() -> None:
    text = "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_types: lora\nfinetuning_type: full\n"
    imported = read_configuration(f"{text}cutoff_len: 2048\nper_device_train_batch_size: 1\nbf16: true\n")
    run = imported.complete(hardware="h100", num_gpus=8)
    others = imported.undecided(run)
    assert [(other.name, other.run["adapters"]["rank"]) for other in others] == [("finetuning_types", 16)]
    assert imported.assumed["disable_gradient_checkpointing"] == "False"


MEGATRON = (
    "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --num-experts 8 "
)
NESTED_LOOPS = "".join(f"for a{depth} in {'x ' * 16}; do " for depth in range(11)) + "A= " + "; done" * 11
SIXTEEN = "A=" + "x" * 16 + "\n" + "A=$A$A$A$A\n" * 7


@pytest.mark.parametrize(
    "script",
    [
        "A=x\n" + "A=$A$A\n" * 60, "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60, NESTED_LOOPS,
        "f() { f; f; f; }\nf\n", "f() { for i in 1 2 3 4 5 6 7 8; do f; done; }\nf\n", SIXTEEN + "B=${A#*y}\n",
        SIXTEEN + "B=${A%%*y}\n", SIXTEEN + "B=${A//x/$A}\n", SIXTEEN + "B=$((" + "A+" * 1000 + "1))\n",
        "cat <<a\na\n" * 20_000, "A[1000]=1\n" * 20_000,
    ],
    ids=range(11),
)  # fmt: skip
def test_a_script_that_grows_without_end_is_refused(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_words, "_MAX_CHARACTERS", 1_000_000)  # a quarter of what is allowed
    with refused("more than 1,000,000 characters"):
        read_shell(script)


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


@pytest.mark.parametrize("pattern", ["^node[0-9]+$", "^[[:alpha:]]+[[:digit:]]+$", "[[a&&b||0]17"])
def test_a_plain_pattern_is_tried(pattern: str) -> None:
    assert read_shell(f"P='{pattern}'\nif [[ node017 =~ $P ]]; then A=met; fi").variables["A"] == ["met"]


def test_files_that_source_each_other_many_times_end(tmp_path: Path) -> None:
    for number in range(11):
        (tmp_path / f"s{number}.sh").write_text(f"source s{number + 1}.sh\n" * 16)
    (tmp_path / "s11.sh").write_text("A=1\n")
    with pytest.raises(SpecError, match="more than 4,000,000 characters"):
        read(tmp_path / "s0.sh", "megatron")


@pytest.mark.parametrize(
    "option",
    [*TABLES["an_option_out_of_range_is_refused_in_a_short_line"],
        "--moe-layer-freq '" + "(" * 500 + "'",
        "--tensor-model-parallel-size " + "9" * 5_000],
)  # fmt: skip
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
    [*TABLES["a_value_that_no_configuration_has_is_not_known"],
        "x = [1]\n" + "x = [x, x]\n" * 40 + "return str(x)",
        "x = [1]\ny = [1]\n" + "x = [x, x]\ny = [y, y]\n" * 40 + "return x == y"],
    ids=range(8),
)  # fmt: skip
def test_a_value_that_no_configuration_has_is_not_known(body: str) -> None:
    assert isinstance(value_of(body), Unknown)


@pytest.mark.parametrize("body", TABLES["a_recipe_that_goes_on_without_end_is_refused"])
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


TABLES = yaml.safe_load((Path(__file__).parent / "shell_words.yaml").read_text())


@pytest.mark.parametrize(("text", "words"), TABLES["scripts"])
def test_words_of_a_script(text: str, words: list[str]) -> None:
    assert read_shell(text).words == words


def test_nothing_is_run(tmp_path: Path) -> None:
    read_shell(f"touch {tmp_path}/a; A=$(touch {tmp_path}/b); $((__import__('os').mkdir('{tmp_path}/c')))")
    assert not list(tmp_path.iterdir())


def test_files_that_a_script_sources_and_writes() -> None:
    texts = {"conf.sh": "LAYERS=7", "run.sh": "run --n $LAYERS --tp $1 --b"}
    script = read_shell(
        'source $DIR/conf.sh\ncat <<EOF > ds.json\n{"a": $LAYERS}\nEOF\nsrun -N 2 bash $DIR/run.sh 4 || run --n 2',
        lambda name: texts.get(name[1:]),
    )
    assert script.words == ["srun", "-N", "2", "run", "--n", "7", "--tp", "4", "--b"]
    assert script.files == {"ds.json": '{"a": 7}\n'}


def test_variables_that_double_themselves() -> None:
    with pytest.raises(SpecError, match="variables of the script make more than 4,000,000 characters"):
        read_shell("A=aaaaaaaa\n" + "A=$A$A\n" * 40)
