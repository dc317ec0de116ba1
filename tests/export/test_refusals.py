"""What trainers refuse by their own checks is told, and what an export cannot express is refused, by name.

The table of options holds each option once, and every function that it names.
Runs have the length, optimizer and intervals that are planned, in every trainer's files.
Virtual stages come out in model order, wherever the ranks hold them, with what each recomputes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tables import beside

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.export import bundle_of
from planner.export.import_run import read_configuration
from planner.export.keyed_settings import table as dialects
from planner.export.megatron import model_options, plan_options
from planner.export.megatron.option_rows import all_rows, broken_rows, options_of, rows_of, table
from planner.export.megatron.script_reading import named_refusals, refusals
from planner.export.refusal import Inexpressible
from planner.export.run_settings import run_settings
from planner.export.stages import is_even, is_looped, recomputed_layers, virtual_stages
from planner.export.targets import TRAINERS
from planner.export.trainer_files import Arguments, filled
from planner.specs.registry import load_model, model_names

PLANS = [
    (target, *row)
    for target, rows in yaml.safe_load(Path(__file__).with_name("refused_plans.yaml").read_text()).items()
    for row in rows
]
SCRIPTS = Path(__file__).parents[2] / "scripts"
_MODEL = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16"
CASES: dict[str, str] = {
    "layers_per_stage": "--num-layers 46 --pipeline-model-parallel-size 4",
    "layers_per_virtual_stage": f"{_MODEL} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4",
    "layers_of_virtual_stage": f"{_MODEL} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4",
    "empty_end": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 0",
    "middle_layers": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 4",
    "virtual_stages_of_ends": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3 "
    "--num-virtual-stages-per-pipeline-rank 2",
    "virtual_stages_of_middle": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 "
    "--decoder-last-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    "positions_below_sequence": "--max-position-embeddings 2048 --seq-length 4096",
    "group_sizes": f"{_MODEL} --group-query-attention --num-query-groups 3",
    "heads_without_channels": "--hidden-size 2048 --num-attention-heads 24",
    "delta_heads": f"{_MODEL} --linear-num-key-heads 6 --tensor-model-parallel-size 4",
    "experts_of_groups": f"{_MODEL} --num-experts 12 --moe-router-num-groups 8",
    "unrotated_layers": f"{_MODEL} --no-rope-freq 5",
    "ends_in_bf16": f"{_MODEL} --pipeline-model-parallel-size 24 --fp8-format e4m3 --first-last-layers-bf16 "
    "--num-layers-at-end-in-bf16 2",
}  # fmt: skip


LOST = {
    "ends_without_pipeline": "--num-layers 20 --decoder-first-pipeline-num-layers 1",
    "no_middle": f"{_MODEL} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
    "--decoder-last-pipeline-num-layers 3",
}
"""Options that build fewer layers than the model has."""


def broken(text: str) -> set[str]:
    around = {"CUDA_DEVICE_MAX_CONNECTIONS": ["1"]}
    return {name for name, _ in named_refusals({**options_of(text.split()), **around})}


OPTIONS = {
    name if name[0] == "-" else "--" + name.rpartition(".")[2].replace("_", "-")
    for name in json.loads((SCRIPTS / "known_trainers.json").read_text())["megatron"]["options"]
} | {"--fp8-format", "--fp4-format", "--disable-bias-linear", "--recompute-layer-ids", "CUDA_DEVICE_MAX_CONNECTIONS"}
"""Options of the trainer's own source; three are fields by another name, and one is Primus'."""
TABLES = {name: row["refused"] for name, row in dialects().items() if "refused" in row}
OF_FOLDER = beside(__file__)
ROWS = [(name, rows[name]) for rows in (table()["refused"], *TABLES.values()) for name in rows]


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_do_not_divide_are_told(name: str) -> None:
    assert name in broken(CASES[name])


def met(*clauses: str) -> dict[str, list[str]]:
    """Options that clauses hold of."""
    options: dict[str, list[str]] = {}
    for clause in clauses:
        name, *said = re.sub(r"> (\d)", lambda found: str(int(found[1]) + 1), clause).split()
        options.setdefault(name, []).extend(word.split("|")[0] for word in said)
    return options


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_condition_is_told_by_its_row(name: str, row: dict[str, list[str]]) -> None:
    for given in row["given"]:
        clauses = (*row.get("beside", ()), given)
        assert (name in dict(broken_rows({name: row}, met(*clauses)))) is ("needs" in row)
        for other in row.get("excludes", ()):
            assert name in dict(broken_rows({name: row}, met(other, *clauses)))
        for other in row.get("needs", ()):
            assert name not in dict(broken_rows({name: row}, met(other, *clauses)))


def test_rows_name_options_that_megatron_has() -> None:
    clauses = [
        clause
        for row in table()["refused"].values()
        for part in row.values()
        if not isinstance(part, str)
        for clause in part
    ]
    names = {clause.split()[0] for clause in clauses} - {"--dynamic-context-parallel"}  # of 0.21
    assert {name for name in names if name not in OPTIONS and name.replace("--no-", "--") not in OPTIONS} == set()


@pytest.mark.parametrize(
    "text",
    [
        *OF_FOLDER["what_starts_is_not_refused"],
        f"{_MODEL} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 --bf16",
        f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5 "
        "--decoder-last-pipeline-num-layers 5",
        f"{_MODEL} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ],
)
def test_what_starts_is_not_refused(text: str) -> None:
    assert broken(text) == set()


@pytest.mark.parametrize("name", LOST)
def test_fewer_layers_than_the_model_has_are_no_price(name: str) -> None:
    with pytest.raises(SpecError, match=r"builds 1 of 20 layers|18 layers are left for 0 middle stages"):
        refusals(options_of(LOST[name].split()))


def test_a_model_of_the_users_is_held_against_the_stages() -> None:
    text = "megatron sft --load X --pipeline_model_parallel_size 4 --max_length 4096"
    imported = read_configuration(text)
    imported.complete(hardware="h100", num_gpus=64, model="glm-4.5-air")
    assert imported.refused == ["46 layers are no multiple of the 4 pipeline stages"]


def test_what_the_parser_alone_refuses_is_none_of_bridges() -> None:
    options = options_of(["--tp-comm-overlap", "--tensor-model-parallel-size", "1"])
    assert [*named_refusals(options, parsers=())] == []
    assert [name for name, _ in named_refusals(options)] == ["overlap_without_sequence_parallel"]


@pytest.mark.parametrize(("text", "says"), OF_FOLDER["files_of_other_trainers_are_held_against_their_tables"])
def test_files_of_other_trainers_are_held_against_their_tables(text: str, says: str) -> None:
    source = "bridge" if text.startswith("model.") else None
    assert any(says in reason for reason in read_configuration(text, source).refused)


@pytest.mark.parametrize(("target", "options", "reasons"), PLANS)
def test_a_plan_that_a_target_cannot_express_is_refused_by_name(
    planned: Callable[..., Plan], target: str, options: dict[str, Any], reasons: list[str]
) -> None:
    plan = planned(**options)
    with pytest.raises(Inexpressible) as caught:
        TRAINERS[target].write(plan)
    assert caught.value.exit_code == 2
    assert set(reasons) <= {reason.name for reason in caught.value.reasons}
    assert any("products in groups" in warning for warning in plan.warnings) is (reasons == ["grouped_experts"])


ROOT = Path(str(plan_options.__file__)).parents[1]
_CODECS = {"model": model_options.CODECS, "layout": plan_options.CODECS}
_TWICE = {
    "--lr-decay-style", "--ckpt-format", "--tokenizer-type", "--train-iters", "--eval-iters", "--eval-interval",
    "--no-bias-gelu-fusion",
}  # fmt: skip
"""Options whose value depends on the section that a run has."""


def test_an_option_has_one_row() -> None:
    counts = Counter(row.name for row in all_rows())
    assert {name for name, count in counts.items() if count > 1} == _TWICE
    paths = [path for name, path in {row.name: row.bridge for row in all_rows()}.items() if path]
    assert len(set(paths)) == len(paths), "a field of Bridge is the value of one option"


@pytest.mark.parametrize("part", _CODECS)
def test_rows_and_functions_name_each_other(part: str) -> None:
    named = {row.by for rows in rows_of(part).values() for row in rows} - {""}
    assert named == set(_CODECS[part])


def test_switches_and_dtypes_set_options_of_some_row() -> None:
    """But for those that Megatron-Bridge and Primus need no word for."""
    rows = {row.name for row in all_rows()}
    settings: list[Arguments] = [
        row for rows in table()["switches"].values() for row in rows if not row.get("read_only")
    ]
    settings += [*table()["dtypes"].values(), *table()["narrow_weights"].values()]
    unknown = {name for row in settings for name in row if name.startswith("--")} - rows
    assert unknown == {
        "--enable-cuda-graph", "--external-cuda-graph", "--moe-enable-deepep", "--grad-reduce-in-bf16",
        "--exp-avg-dtype", "--exp-avg-sq-dtype", "--muon-tp-mode",
    }  # fmt: skip


def test_rows_of_settings_are_filled_and_left_out() -> None:
    layout = SimpleNamespace(pp=4, vpp=1)
    row = {
        "pp": "=layout.pp", "vpp?": "=chunks", "mtp??": "=blocks", "tune??": "=tunes", "flag?": {"if": "=flag", "x": 1},
        "lr": ["=arguments.get('--lr', 1)", "='--lr' in arguments"],
        "variable?": {"if": "=layout.pp", "value": "=as it is"},
    }  # fmt: skip
    values = {"layout": layout, "chunks": 0, "blocks": 0, "tunes": None, "flag": False, "arguments": {"--min-lr": 0}}
    assert filled(row, values) == {"pp": 4, "mtp": 0, "lr": [1, False], "variable": "=as it is"}


def test_every_file_of_the_settings_is_written() -> None:
    sources = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    files = yaml.safe_load((ROOT / "settings.yaml").read_text())
    assert [name for name in files if f'"{name}"' not in sources] == []


Planned = Callable[..., Plan]


def test_a_published_model_learns_as_it_was_published(planned: Planned) -> None:
    run = run_settings(planned("llama-3.1-405b", 2048, tp=8, pp=16, seq_length=8192, batch=2048, tokens=15.6e12))
    assert run.num_steps == round(15.6e12 / (8192 * 2048))
    assert (run.optimizer.learning_rate, run.optimizer.min_learning_rate, run.warmup_steps) == (8e-5, 8e-7, 8000)
    assert "arXiv:2407.21783" in run.notes[1]
    assert "--tokens" not in run.notes[0]


def test_defaults_say_that_they_are(planned: Planned) -> None:
    run = run_settings(planned("qwen3-8b", 16))
    assert run.optimizer.learning_rate == 3e-4
    assert "none is published" in run.notes[1]
    assert "20 for each active parameter, since the plan states none (--tokens)" in run.notes[0]
    assert run_settings(planned("qwen2.5-72b", 64, tp=4, pp=4)).optimizer.learning_rate == 1.5e-4


def test_fine_tuning_learns_slowly_and_asks_for_weights(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 16)
    tuned = plan.training.model_copy(update={"starts_trained": True})
    run = run_settings(plan.model_copy(update={"training": tuned}))
    assert (run.optimizer.learning_rate, run.num_steps) == (2e-5, 1000)
    assert "CHECKPOINTS" in run.notes[2]


def test_a_short_run_warms_up_for_a_tenth_of_it(planned: Planned) -> None:
    run = run_settings(planned("llama-3.1-8b", 16, batch=64, tokens=64 * 2048 * 50))
    assert (run.num_steps, run.warmup_steps) == (50, 5)
    assert run_settings(planned("llama-3.1-8b", 16, batch=64, tokens=1)).num_steps == 1


def test_a_rate_that_falls_at_the_end_falls_over_that_share(planned: Planned) -> None:
    run = run_settings(planned("deepseek-v3", 512, pp=8, ep=64, layout="Et*7|(t*8|)*6t*6mL"))
    assert run.decay_steps == round(0.32 * (run.num_steps - run.warmup_steps))


@pytest.mark.parametrize(("gpus", "minutes"), [(8, 10), (1024, 10), (2048, 20), (16384, 140)])
def test_timeouts_grow_with_the_ranks(planned: Planned, gpus: int, minutes: int) -> None:
    run = run_settings(planned("llama-3.1-8b", gpus))
    assert (run.init_timeout_minutes, run.timeout_minutes) == (minutes, 10)


def test_saves_are_as_often_as_the_plan_says(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 1024, tokens=1e12)
    assert plan.goodput is not None
    run = run_settings(plan)
    assert run.save_interval_steps == round(plan.goodput.checkpoint_interval_s / plan.step.step_s)
    assert run.kept_save_interval_steps % run.save_interval_steps == 0
    assert run.evaluation_interval_steps * plan.goodput.evaluation_fraction >= 10 / 3


def test_more_gpus_save_more_often(planned: Planned) -> None:
    few, many = (planned("llama-3.1-8b", num_gpus) for num_gpus in (8, 1024))
    seconds = [run_settings(plan).save_interval_steps * plan.step.step_s for plan in (few, many)]
    assert seconds[0] > 2 * seconds[1]
    assert seconds[0] < 3600 + few.step.step_s


@pytest.mark.parametrize("name", model_names())
def test_published_optimizers_name_their_source(name: str) -> None:
    training = load_model(name).training
    if training is not None and training.optimizer is not None:
        optimizer = training.optimizer
        assert "arXiv" in optimizer.source
        assert optimizer.min_learning_rate < optimizer.learning_rate < 1e-3


JOBS: dict[str, dict[str, Any]] = OF_FOLDER["refusals_jobs"]
PROOF = "random tokens and saves nothing"
"""The torch runner trains nothing that is kept: it shows that a layout runs."""
NEEDS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("run_needs.yaml").read_text())


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("target", JOBS)
def test_every_need_is_met_or_named(exported: Callable[[str], str], target: str, need: str) -> None:
    pattern = PROOF if target == "torch" else NEEDS[need][target]
    assert re.search(pattern, exported(target)), f"{target}: {need}"


@pytest.fixture(scope="module")
def exported(planned: Planned) -> Callable[[str], str]:
    """exported(target): the text of all files and notes of an export; each is made once."""
    texts: dict[str, str] = {}

    def text_of(target: str) -> str:
        if target not in texts:
            bundle = bundle_of(planned(**JOBS[target]), [target])
            texts[target] = "\n".join([*(file.text for file in bundle.files), *bundle.notes])
        return texts[target]

    return text_of


FROM_THE_LAUNCHER = {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MOCK", "PREFLIGHT", "NUMA_BINDING", "PLAN_DIR", "GPUS"}
FROM_ELSEWHERE = re.compile(r"SLURM_\w+|BASH\w*|PWD|PATH|PYTHONPATH|TMPDIR")
"""Variables of Slurm and of the shell itself."""


@pytest.mark.parametrize("target", JOBS)
def test_launchers_read_no_variable_that_nobody_sets(planned: Planned, target: str) -> None:
    bundle = bundle_of(planned(**JOBS[target]), [target])
    for file in bundle.files:
        if not file.executable:
            continue
        code = re.sub(r"^\s*#.*$", "", file.text, flags=re.MULTILINE)
        read = set(re.findall(r"\$\{?([A-Za-z_]\w*)", code))
        assigned = set(re.findall(r"(?:^|[\s;(])([A-Za-z_]\w*)\+?=", code)) | {"HOSTS"}
        placeholders = {place.name for place in file.placeholders}
        unknown = {name for name in read - assigned - placeholders if not FROM_ELSEWHERE.fullmatch(name)}
        assert unknown <= FROM_THE_LAUNCHER, f"{file.name}: {unknown}"


@pytest.mark.parametrize(("target", "name"), OF_FOLDER["a_program_reads_no_variable_that_nobody_names"])
def test_a_program_reads_no_variable_that_nobody_names(planned: Planned, target: str, name: str) -> None:
    bundle = bundle_of(planned(**JOBS[target]), [target])
    program = next(file.text for file in bundle.files if file.name == name)
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', program))
    assert read - {"MOCK"} == {place.name for place in bundle.placeholders if not place.is_optional}


def test_environments_are_the_vendors(planned: Planned) -> None:
    names = {}
    for hardware in ("h100", "mi300x"):
        for target in ("megatron", "torchtitan"):
            plan = planned("llama-3.1-8b", 16, hardware=hardware, runtime=target)
            command = TRAINERS[target].write(plan).command
            assert command is not None
            names[hardware, target] = set(command.environment)
    for target in ("megatron", "torchtitan"):
        assert {"HSA_NO_SCRATCH_RECLAIM", "GPU_MAX_HW_QUEUES", "NCCL_IB_GID_INDEX"} <= names["mi300x", target]
        assert not any(name.startswith(("HSA", "RCCL", "GPU_")) for name in names["h100", target])
    assert "NCCL_NVLS_ENABLE" not in names["mi300x", "megatron"]


def test_interleaved_chunks_follow_each_other(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 16, pp=4, vpp=2, layers_per_stage=(1, 5, 4, 4, 4, 5, 5, 4))
    stages = virtual_stages(plan)
    assert [(s.rank, s.chunk) for s in stages] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]
    assert [s.num_layers for s in stages] == [1, 5, 4, 4, 4, 5, 5, 4]
    assert [s.embedding for s in stages] == [True] + [False] * 7
    assert [s.head for s in stages] == [False] * 7 + [True]
    assert is_looped(stages, 4)
    assert not is_even(stages)


def test_v_shaped_chunks_come_back(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 4, runtime="torch-eager", pp=4, vpp=2, schedule="zb-v")
    stages = virtual_stages(plan)
    assert [s.rank for s in stages] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert not is_looped(stages, 4)
    assert is_even(stages)


def test_mtp_follows_its_rank_s_layers(planned: Planned) -> None:
    plan = planned("deepseek-v3", 1024, ep=64, pp=16, vpp=2, layout="Et*3|(tt|)*29m|L")
    stages = virtual_stages(plan)
    assert [j for j, s in enumerate(stages) if s.mtp] == [30]
    assert stages[30].num_layers == stages[31].num_layers == 0
    assert not stages[30].is_empty


def test_stages_that_leave_layers_out_are_refused(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 16, pp=4)
    first = plan.best.stages[0].model_copy(update={"chunks": ((0, 7),)})
    rest = plan.best.stages[1:]
    for stages, says in (
        ((first, *rest), r"\[\(0, 7\)\].* do not hold 32 layers once"),
        (rest, "expected 1 for each of pp 4"),
    ):
        with pytest.raises(SpecError, match=says):
            virtual_stages(plan.model_copy(update={"best": plan.best.model_copy(update={"stages": stages})}))


@pytest.mark.parametrize(
    ("saved", "expected"), OF_FOLDER["chunks_recompute_as_planned"], ids=["of each chunk", "of the rank"]
)
def test_chunks_recompute_as_planned(planned: Planned, saved: tuple[tuple[int, ...], ...], expected: list[int]) -> None:
    plan = planned("llama-3.1-8b", 4, runtime="torch-eager", pp=2, vpp=4)
    none = ((0,),) * 4 if saved else ()
    counts = [({"full": 4, "none": 12}, saved), ({"none": 16}, none)]
    stages = [
        stage.model_copy(update={"recompute": modes, "num_recomputed": num_recomputed})
        for stage, (modes, num_recomputed) in zip(plan.best.stages, counts, strict=True)
    ]
    best = plan.best.model_copy(update={"stages": tuple(stages)})
    assert recomputed_layers(best, virtual_stages(plan)) == expected
