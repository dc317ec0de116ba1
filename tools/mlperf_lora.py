"""MLPerf's llama2_70b_lora: what a clone of the results says of each run, as `plan evaluate --runs` takes it.

The benchmark fixes the sequences (8,192 tokens, packed, attended across) and the adapters (rank 16 beside attention's
products, a tenth of their inputs dropped). The description of the system names its GPUs. Layout and switches stand in
the configurations beside the code, of which one must have the log's GPUs, batch and accumulation.
"""

import json
import re
import sys
from pathlib import Path
from statistics import median

from planner.errors import PlannerError
from planner.export.scripts.shell import read_shell
from planner.observe.read import observe

BENCHMARK, MODEL, SEQ_LENGTH = "llama2_70b_lora", "llama-2-70b", 8192
ADAPTERS = {"rank": 16, "targets": ["attention"], "dropout": 0.1}
GPUS = {
    "GB300": "gb300-nvl72", "B300": "b300-sxm-270gb", "GB200": "gb200-nvl72", "B200": "b200-sxm-180gb",
    "H200-NVL": "", "H200": "h200-sxm-141gb", "H100": "h100-sxm-80gb", "L40S": "l40s-48gb",
    "MI300X": "mi300x", "MI325X": "mi325x", "MI350X": "mi350x", "MI355X": "mi355x",
}  # fmt: skip
"""Our profiles by words of the names that submitters give their GPUs; none for one that we lack."""
DATES = {"4.0": "2024-06", "4.1": "2024-11", "5.0": "2025-06", "5.1": "2025-11"}
NAMED = re.compile(r"(GB300|B300|GB200|B200|H200|H100|L40S|MI300X|MI325X|MI350X|MI355X)", re.IGNORECASE)
_FLAGS = (
    "FP4", "FP8_ACT", "FP8_ACTIVATION", "TP_COMM_OVERLAP", "LORA_A2A", "USE_TE_OPS", "NEMO_LORA_USE_THUNDER_DROPOUT",
    "MCORE_CUDA_GRAPH", "LAYER_CUDA_GRAPH",
)  # fmt: skip
_ON, _OFF = ("1", "True", "true"), ("0", "False", "false")


def system_of(log):
    """GPU, number of GPUs and GPUs a node of the system that a log is of; None where nothing describes it."""
    path = log.parents[3] / "systems" / f"{log.parents[1].name}.json"
    try:
        data = json.loads(path.read_text(errors="replace"))
        per_node = int(data["accelerators_per_node"])
        name = next(name for name in GPUS if name in data["accelerator_model_name"].upper())
        return name, int(data["number_of_nodes"]) * per_node, per_node
    except (OSError, ValueError, KeyError, StopIteration):
        return None


def text_of(path, seen=()):
    """A configuration with those that it sources before it, which some submitters left beside another system's code."""
    text = path.read_text(errors="replace")
    folders = (path.parent, path.parent / "configs", *sorted(path.parent.parent.glob("*")))
    for name in dict.fromkeys(re.findall(r"(config[\w.-]*\.sh)", text)):
        other = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if other is not None and other != path and other not in seen:
            text = text_of(other, (*seen, path)) + "\n" + text
    return text


def run_of(path, batch, accumulated, system):
    """The run that a configuration starts on a system; None where it is of another one, or of another batch."""
    name, num_gpus, per_node = system
    if not GPUS[name]:
        return None
    values = {key: words[0] for key, words in read_shell(text_of(path)).variables.items() if words}
    tp, pp, cp, micro = (int(values.get(key, 1)) for key in ("TP", "PP", "CP", "MBS"))
    stated = int(values["DGXNNODES"]) * int(values.get("DGXNGPU", 8))
    dp = stated // (tp * pp * cp)
    sequences = int(values["MINIBS"])
    if (stated, dp * sequences, sequences // micro) != (num_gpus, batch, accumulated):
        return None
    on = {key: values.get(key) in _ON for key in _FLAGS}
    parallelism = {
        "tp": tp, "cp": cp, "pp": pp, "vpp": 1, "dp": dp, "micro_batch_size": micro, "sequence_parallel": tp > 1,
        "schedule": "none" if pp == 1 else "1f1b", "zero_stage": 1,
    }  # fmt: skip
    if values.get("ACG") == "full":
        parallelism |= {"recompute": "full", "recompute_num_layers": int(values["ACL"])}
    features = {"cross_entropy_fusion": False, "fp8_params": True, "tp_comm_overlap": tp > 1 and on["TP_COMM_OVERLAP"]}
    features |= {"lora_a2a": True} if on["LORA_A2A"] else {}
    features |= {"te_op_fuser": True} if on["USE_TE_OPS"] else {}
    features |= {"lora_dropout_recompute": True} if on["NEMO_LORA_USE_THUNDER_DROPOUT"] else {}
    features |= {"activation_func_fp8_input_store": True} if on["FP8_ACT"] or on["FP8_ACTIVATION"] else {}
    features |= {"cuda_graph": "full_iteration"} if on["MCORE_CUDA_GRAPH"] or on["LAYER_CUDA_GRAPH"] else {}
    if cp > 1:
        features["cp_comm_type"] = values.get("CP_COMM_TYPE") or _default_exchange(path, "B" in name)
    # all that say it are in 8 bits or fewer
    dtype = "nvfp4" if on["FP4"] else "bf16" if values.get("FP8") in _OFF else "fp8"
    return {
        "hardware": GPUS[name], "num_gpus": num_gpus, "gpus_per_node": per_node, "runtime": "megatron",
        "seq_length": SEQ_LENGTH, "global_batch_size": batch, "dtype": dtype, "adapters": ADAPTERS,
        "parallelism": parallelism, "features": features,
    }  # fmt: skip


def _default_exchange(path, is_blackwell):
    """The exchange of context parallelism that the code beside a configuration takes unless it is told one.

    Where no code is beside it, it is NVIDIA's of the same round, which has NeMo 2 on Blackwell.
    """
    folders = (path.parent / "conf", path.parent / "src" / "conf", path.parent.parent / "conf")
    texts = [found.read_text(errors="replace") for folder in folders for found in folder.glob("*.yaml")]
    is_exchange = any("CP_COMM_TYPE,'a2a'" in text for text in texts) if texts else is_blackwell
    return "a2a" if is_exchange else "p2p"


def is_for(path, system, name):
    """True where a configuration's name has the GPU or a word of the system, or its folder the system."""
    named = {found.upper() for found in NAMED.findall(path.stem)}
    word = path.stem.removeprefix("config_").split("_")[0].lower()
    return name in named if named else system in path.parts or word in system.lower()


def configured(log, observation, accumulated):
    """The one run among the configurations that has a log's GPUs and batch, and its file; None where it is not one."""
    system, batch = system_of(log), observation.facts.global_batch_size
    if system is None or batch is None:
        return None
    folder = log.parents[3] / "benchmarks" / BENCHMARK / "implementations"
    own = sorted((folder / log.parents[1].name).glob("**/config*.sh"))
    for paths in (own, sorted(folder.glob("**/config*.sh"))):
        found = {}
        for path in paths:
            if not is_for(path, log.parents[1].name, system[0]):
                continue
            try:
                run = run_of(path, batch, accumulated, system)
            except (KeyError, ValueError, IndexError, OSError):
                continue
            if run is not None:
                found.setdefault(json.dumps(run, sort_keys=True), (run, path))
        if found:
            return next(iter(found.values())) if len(found) == 1 else None
    return None


def accumulated_of(log):
    """Micro-batches of a step, as a log states them; 0 where it does not."""
    found = re.search(r'"gradient_accumulation_steps", "value": (\d{1,6})\b', log.read_text(errors="replace"))
    return int(found[1]) if found else 0


def step_of(observation):
    """Seconds of a step: the median of the blocks between evaluations, the first of which holds the start."""
    return median(observation.series.seconds)


def published(root, logs, read=observe):
    """One row of the family of fine-tuning runs for each system whose layout is told, of the median of its logs."""
    version = re.search(r"(\d\.\d)", root.resolve().name)
    release, systems = version[1] if version else "", {}
    for log in logs:
        systems.setdefault(log.parent, []).append(log)
    told = set()
    for folder, members in systems.items():
        seen = list(_read(members, read))
        steps = tuple(round(step_of(each), 5) for each in seen)
        found = configured(members[0], seen[0], accumulated_of(members[0])) if seen else None
        if found is None or steps in told:  # some submitters list the same logs under two names
            continue
        told.add(steps)
        run, path = found
        submitter, system = folder.parents[2].name, folder.parent.name
        peak = seen[0].peak_memory_bytes
        memory = {"peak_memory_gib": round(peak / 2**30, 3), "memory_kind": "allocated"} if peak else {}
        name = f"{submitter}-{system}".lower().replace("_", "-")
        is_own = system in path.parts or run["hardware"].split("-")[0] in path.stem.lower()
        yield {
            "id": f"mlperf-{release.replace('.', '-')}-lora-{name}",
            "from": f"mlperf-lora-{run['hardware'].split('-')[0]}",
            "source": f"MLPerf Training v{release}, {submitter}/results/{system}/{BENCHMARK}: median over {len(seen)} "
            f"logs of the median of their blocks between evaluations; {path.name}",
            "address": f"https://github.com/mlcommons/training_results_v{release}",
            "date": DATES.get(release, ""),
            "trust": "A" if is_own else "B",
            "run": {"model": "Llama-2-70B", **run},
            "measured": {"step_s": round(median(steps), 4), **memory, "ran_out": False},
            **(
                {}
                if is_own
                else {"note": "The configuration with its GPUs and batch lies beside another system's code."}
            ),
        }


def _read(logs, read):
    for log in logs:
        try:
            yield read([str(log)])
        except PlannerError as error:
            print(f"not read: {error.message}", file=sys.stderr)


def write_rows(path, rows):
    """Write rows one a line, in place of those with their names, and return how many there are."""
    path = Path(path)
    known = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        known[json.loads(line)["id"]] = json.loads(line)
    known |= {row["id"]: row for row in rows}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in known.values()))
    return len(known)
