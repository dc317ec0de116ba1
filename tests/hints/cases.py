"""Command lines that fail, each with the hint that it gets; `test_hints_work.py` types what the hint says."""

from __future__ import annotations

from hints.applied import Case

_1B = "evaluate -m 1b -g 8 "
_CLOSE = "close"

CASES = (
    Case("cli/app.py", "or one of the commands", "evaluat -h", option="evaluat"),
    Case("cli/inputs.py", "--runtime {other}", _1B + "--runtime megatron-deepspeed"),
    Case("cli/inputs.py", "--batching packed", _1B + "--batching loose"),
    Case("cli/inputs.py", "add --examples 50k", _1B + "--epochs 2"),
    Case("cli/inputs.py", "leave --tokens out", _1B + "--examples 5k --tokens 1B"),
    Case("cli/inputs.py", "leave --switch out", _1B + "--optimizer adamw --switch default"),
    Case("cli/inputs.py", "leave --{dated} out", "-m 1b -g 8 --tokens 1T --days 3"),
    Case("cli/options.py", "write {row.name} 30", _1B + "--examples 5k --epochs 0", option="--epochs"),
    Case("specs/phases.py", "{where} 400:2048", _1B + "--batching padded --example-lengths foo"),
    Case("cli/inputs.py", "add --example-lengths", _1B + "--batching padded"),
    Case("cli/inputs.py", "--optimizer adamw", _1B + "--optimizer adamw,muon"),
    Case("cli/inputs.py", "--objective dpo has one", _1B + "--reference model"),
    Case("cli/inputs.py", "add --lora, or --reference", _1B + "--reference adapters --objective dpo"),
    Case("cli/inputs.py", "for example plan --model", "evaluate -m 1b", moves_on=True),
    Case("trainers/load.py", "known", _1B + "--runtime torch-fsdp@0.1", option="--runtime"),
    Case("cli/inputs.py", "--global-batch-size {batch + 1}", _1B + "--objective dpo -b 7"),
    Case("cli/inputs.py", "among(known, field)", _1B + "--assume network_gb_pers=3", option="--assume"),
    Case("cli/inputs.py", "join(near)", _1B + "--batch-tokens 1"),
    Case("cli/inputs.py", "write 16777216, 16M or 15T", _1B + "--tokens 15X", option="--tokens"),
    Case("cli/plan_command.py", "add --from plan.json", "-g 8 --keep tp", moves_on=True),
    Case("cli/app.py", "among(words, topic)", "-h laout", option="laout"),
    Case("cli/options.py", "among(SECTIONS, name)", "-m 1b -g 1 --show rejectd", option="--show"),
    Case("cli/schedule.py", "{option} {example}", "schedule 1f1b --pp 4 --micro-batches 8 --slow-stage x"),
    Case("cli/schedule.py", "{option} {example}", "schedule 1f1b --pp 4 --micro-batches 8 --slow-link x"),
    Case("layout/evaluate.py", "f\"one of {', '.join(known)}\"", _1B + "--hardware a100 --dtype fp8", option="--dtype"),
    Case("layout/evaluate.py", "f\"one of {', '.join(known)}\"", _1B + "--hardware v100 --dtype fp8", option="--dtype"),
    Case("layout/evaluate.py", "{since} has it", _1B + "--runtime megatron@0.14 --dtype nvfp4 --hardware b200"),
    Case("layout/evaluate.py", "--dtype {runtime.dtypes[0]}", _1B + "--runtime hf --dtype fp8"),
    Case("layout/evaluate.py", "MODULES", _1B + "--recompute-modules mlpp", option="--recompute-modules"),
    Case("layout/given.py", "would do", _1B + "--tp 3", option="--tp"),
    Case("layout/given.py", "would do", _1B + "--tp 64", option="--tp"),
    Case("layout/given.py", "would do", _1B + "--cp 3", option="--cp"),
    Case("layout/given.py", "would do", "evaluate -m mixtral-8x7b -g 8 --ep 3", option="--ep"),
    Case("layout/given.py", "GPUs spare", "evaluate -m 1b -g 12 --tp 8", option="--dp"),
    Case("layout/given.py", "sequences, or another dp'", "evaluate -m 1b -g 1001 -b 64", option="-b"),
    Case("layout/given.py", "lower dp to", _1B + "--dp 16", option="--dp"),
    Case("layout/given.py", "lower dp to", _1B + "--tp 2 --dp 8 -b 24", option="--dp"),
    Case("layout/given.py", "sequences, or another dp'", _1B + "-b 7", option="--global-batch-size"),
    Case("layout/given.py", "sequences, or another dp'", _1B + "--micro-batch-size 3 -b 8", option="-b"),
    Case("layout/given.py", "_enough_sequences", _1B + "--pp 4 --vpp 2 -b 6 --dp 2", option="-b"),
    Case(
        "layout/given.py", "_enough_sequences",
        "evaluate -m 1b -g 6 --pp 3 --dp 2 --schedule dualpipe-v --vpp 2 -b 4", option="-b",
    ),
    Case(
        "layout/given.py", "_TRAINABLE", _1B + "--pp 2 --vpp 2 --dp 4 -b 64 --schedule zbv", option="--schedule",
        moves_on=True,
    ),
    Case("layout/given.py", "set ep to 1", _1B + "--ep 8", option="--ep"),
    Case("months/whole_run.py", "is the most", _1B + "--spares 100 --tokens 1T"),
    Case("schedule/orders.py", "set vpp to", _1B + "--pp 2 --schedule zb-v", option="--vpp"),
    Case("schedule/orders.py", "set vpp to", _1B + "--pp 2 --vpp 3 --schedule 1f1b", option="--vpp"),
    Case(
        "schedule/orders.py", "{below} or", "schedule interleaved-1f1b --pp 4 --micro-batches 9 --vpp 2",
        "--micro-batches",
    ),
    Case("cli/inputs.py", "--gpus {gpus}", "evaluate -m 1b -g 16 --nodes 1"),
    Case("cli/inputs.py", "--tokens {enough", _1B + "--tokens 15"),
    Case("layout/evaluate.py", "add --usd-per-gpu-hour", "-m 1b -g 8 --hardware a800 --tp 1 --pp 1 --usd 5M --top 1"),
    Case("specs/machines.py", "among(known, kind)", _1B + "--network infinibandd", option="--network"),
    Case("specs/machines.py", "nearest(name, known)", _1B + "--host a2-ultra", option="--host"),
    Case("search/enumerate.py", "_nearest(name, runtime)", "-m 1b -g 1 --schedule 1f1c", option="--schedule"),
    Case("specs/registry.py", "lists the names", "evaluate -m llama-3.1-8bb -g 64 --tp 8 --pp 2 -s 2048", option="-m"),
    Case("specs/registry.py", "lists the names", _1B + "--hardware h1000", option="--hardware"),
    Case("specs/cluster.py", "write --tier {EXAMPLE}", _1B + "--tier pod:64"),
    Case("specs/cluster.py", "mended", _1B + "--tier spine:*:10,pod:64:50"),
    Case("specs/cluster.py", "mended", _1B + "--tier pod:64:50,rack:16:80"),
    Case("specs/cluster.py", "mended", _1B + "--tier pod:2:50"),
    Case("specs/cluster.py", "inside to the outside", _1B + "--tier pod:64:50,rack:16:80,spine:*:80"),
    Case("trainers/load.py", "nearest(name, RUNTIMES)", _1B + "--runtime megatrn", option="--runtime"),
    Case("trainers/load.py", "known", _1B + "--runtime megatron@0.5", option="--runtime"),
    Case("trainers/stated.py", _CLOSE, _1B + "--switch cuda_grap=none", option="--switch"),
    Case("trainers/stated.py", "_choice(runtime, name)}{close}", _1B + "--switch cuda_graph=nonne", option="--switch"),
    Case("trainers/stated.py", "default alone", _1B + "--switch default,dispatcher=alltoall"),
    Case("search/why/remedy.py", "works", "-m 1b -g 8 --tp 3 --pp 1 --cp 1 --top 1"),
    Case("search/why/remedy.py", "other.says", "-m 1b -g 8 --memory-headroom 90 --tp 8 --top 1"),
)  # fmt: skip

_SEARCHES = "typing it searches for seconds, or starts processes"
_IMAGES = "it speaks of a config.json with a tower, which tests/specs/test_vision.py has"
_A_FILE = "it mends a file, at the place that the error names, and no option"
_A_PLAN = "it needs a plan of a running job, a probe or an observation; the command's own tests have it"
_PROSE = "a limit in words, and nothing that can be copied"

NOT_TYPED_IN: dict[str, str] = {
    "probe/": "it speaks of GPUs, processes or a plan made anew, which tests/probe has",
    "profile/": "it speaks of measurements of a GPU",
    "validate/": "it names families of published runs, which tests/validate has",
    "observe/": "it speaks of logs and traces, which tests/observe has",
    "serve/": "it answers a page, which tests/serve has",
    "export/": "it speaks of a trainer's file; tests/export and scripts/roundtrips have what is written",
    "cli/validate": "it speaks of kept runs, which tests/cli has", "cli/machine_command.py": "it speaks of GPUs",
    "cli/observe_command.py": _A_PLAN, "trace/": "it runs a module of the user's own, which tests/trace has",
    "cli/import_command.py": _A_FILE,
    "cli/plan_command.py": "what is left speaks of a file of phases or a plan of a running job, which tests/cli has",
    "cli/views.py": _A_PLAN, "cli/sweep_command.py": _SEARCHES, "decide/": _A_PLAN,
    "files.py": "tests/test_interrupted.py has it", "plan_file.py": _A_PLAN, "specs/phases.py": _A_FILE,
    "specs/architectures/": _A_FILE, "trainers/layout_string.py": _PROSE, "trainers/rules/": _A_FILE,
    "schedule/actions.py": _A_FILE, "schedule/graph.py": _A_FILE, "layout/alive.py": _A_PLAN,
}  # fmt: skip
"""Files and folders, below planner/, whose hints are not typed here, and why not."""
NOT_TYPED: dict[tuple[str, str], str] = {
    ("cli/inputs.py", "'--lora'"): "`evaluate` takes the options of adapters as asking for them",
    ("cli/inputs.py", "more than {domain} GPUs"): _PROSE, ("cli/inputs.py", "write {field}="): _PROSE,
    ("cli/inputs.py", "write 8 or 8,16"): _SEARCHES, ("cli/inputs.py", "write 4, 4x256"): _IMAGES,
    ("cli/inputs.py", "--images {number}"): _IMAGES, ("cli/inputs.py", "config.json of one that has"): _IMAGES,
    ("cli/options.py", "write {row.name} {example}"): _PROSE,
    ("cli/options.py", "leave {row.name} out"): "it is to type nothing",
    ("cli/schedule.py", "plan schedule 1f1b --pp 4"): _PROSE,
    ("cli/schedule.py", "--sizes 1,1,2"): _PROSE, ("cli/schedule.py", "{option} 1"): _PROSE,
    ("cli/plan_command.py", "write plan {command}"): _PROSE,
    ("errors.py", "--debug"): "it is shown for a defect alone",
    ("trainers/load.py", "write a list of {switches, value, source}"): _A_FILE,
    ("layout/given.py", "layers are counted from 0 on"): _PROSE,
    ("months/whole_run.py", "fewer --failures"): _PROSE,
    ("schedule/orders.py", "{pp + 1} would do"): "no schedule that the command line takes needs an even pp",
    ("search/case.py", "raise --time-limit"): "a slow machine alone sees it",
    ("search/ilp/program.py", "raise --time-limit"): "a slow machine alone sees it",
    ("search/recipes.py", "is unknown"): "it answers Python, and names no value",
    ("specs/problems.py", "close"): _A_FILE,
    ("specs/registry.py", "check the path"): "a path that is wrong has no one name that is right",
    ("specs/cluster.py", "from 1x to 1000x"): _PROSE, ("trainers/stated.py", "leave {option} out"): _SEARCHES,
    ("trainers/load.py", "versions"): _A_FILE, ("trainers/load.py", "SWITCHES"): _A_FILE,
    ("trainers/load.py", "known[name].values"): _A_FILE,
}  # fmt: skip
"""Hints by file and words that are not typed here, and why not."""
