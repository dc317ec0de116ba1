"""Launchers: launch.sh, launch.sbatch, manifests of Kubernetes, and preflight.py, which looks at a node before.

The environment variables that a plan's exchanges and recipe need are rows by trainer and vendor (settings.yaml).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.megatron.plan_options import is_fsdp, switch_arguments
from planner.export.run_settings import FIRST_RUN_STEPS
from planner.export.spelling import runtime_of
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    Placeholder,
    RunPart,
    ShellText,
    Value,
    argv,
    comment,
    placeholders_of,
    rendered,
    settings,
    shell_words,
    slug,
)
from planner.specs.base import Fields, Named, Said
from planner.specs.reading import shipped_table

PREFLIGHT = "preflight.py"
SHARED_BYTES = 2**27
"""Memory in /dev/shm that a rank's exchanges and loaders take at least; containers begin with 64 MiB for all."""


def preflight(plan: Plan, command: LaunchCommand) -> ExportFile:
    """The program, and what it looks for: GPUs of a node, packages, placeholders, the trainer's version."""
    _, gpus, _ = nodes_of(plan)
    checks = {
        "gpus": gpus,
        "packages": [asdict(requirement) for requirement in command.requirements],
        "placeholders": [asdict(placeholder) for placeholder in command.placeholders],
        "trainer": asdict(command.trainer),
        "network": {"kind": plan.cluster.hardware.network, **row} if (row := network_of(plan)).get("devices") else {},
        "checkpoint_bytes": plan.checkpoint_bytes,
        "promised": promised(plan),
        "shared_bytes": gpus * SHARED_BYTES,
        "host_bytes": gpus * plan.parallelism.host_bytes,
    }
    return ExportFile(PREFLIGHT, node_check(checks))


def node_check(checks: Said) -> str:
    """The program, which ranks trials where it has no checks. No text of a plan can leave JSON in a literal."""
    return rendered("preflight.py", checks=json.dumps(json.dumps(checks)))


def promised(plan: Plan) -> Fields:
    """The facts about a plan that a log is held against."""
    return settings("promised", plan)


def nodes_of(plan: Plan) -> tuple[int, int, int]:
    """(nodes, GPUs of each, GPUs of the last), equal where that takes no more nodes and cuts no group that nodes hold.

    A tensor-parallel group stays in one node, unless it is larger or the cluster has too few nodes for that.
    """
    layout, used, node = plan.parallelism, plan.parallelism.num_gpus_used, plan.cluster.node_size
    tp = layout.tp
    if used <= node:
        return 1, used, used
    largest = node - node % tp if tp <= node else node
    if _num_nodes(used, largest) > _num_nodes(plan.cluster.num_gpus, node):
        largest = node
    nodes = _num_nodes(used, largest)
    groups = (nodes, *(size * nodes for size in (tp, tp * layout.cp, layout.ep * (layout.etp or 1)) if size <= node))
    gpus_per_node = largest if any(used % size for size in groups) else used // nodes
    return nodes, gpus_per_node, used - (nodes - 1) * gpus_per_node


def _num_nodes(num_gpus: int, gpus_per_node: int) -> int:
    return -(-num_gpus // gpus_per_node)


def segment_of(plan: Plan) -> int:
    """Nodes that are asked for in one NVLink domain; 1 where NVLink joins no nodes.

    Slurm wants a number that divides the nodes (`--segment`).
    """
    nodes, gpus, _ = nodes_of(plan)
    most = plan.cluster.nvlink_domain_size // gpus if plan.cluster.is_rack else 1
    return max(size for size in range(1, max(1, min(nodes, most)) + 1) if nodes % size == 0)


LAUNCH = "launch.sh"
_MINUTES_TO_SAVE = 15
"""Minutes before the job's end at which a run saves and ends."""


def torchrun_script(plan: Plan, command: LaunchCommand) -> ExportFile:
    """launch.sh: runs this node's ranks; NODE_RANK and MASTER_ADDR say which node it is and where the first one is."""
    text = _script(LAUNCH, plan, command, command.placeholders, f"bash {LAUNCH}", '"${NODE_RANK:-0}"')
    return ExportFile(LAUNCH, text, executable=True, placeholders=command.placeholders)


def slurm_script(plan: Plan, command: LaunchCommand) -> ExportFile:
    """launch.sbatch: one task per node; the first node of the allocation is where all ranks meet."""
    places, name = (*command.placeholders, *placeholders_of("slurm")), "launch.sbatch"
    text = _script(name, plan, command, places, f"sbatch {name}", '"${SLURM_NODEID:-0}"')
    return ExportFile(name, text, executable=True, placeholders=places)


def _script(
    name: str, plan: Plan, command: LaunchCommand, places: tuple[Placeholder, ...], started_by: str, rank: str
) -> str:
    """The text of a launcher; `rank` is shell text that says which node this is."""
    nodes, gpus, last = nodes_of(plan)
    spared = [place.name for place in places if not (place.in_first_run or place.is_optional)]
    has_arguments = bool(command.arguments or command.words)
    # where the last node starts fewer ranks; nothing but a reader uses the sum
    sizes = f"export GPUS={gpus} TOTAL_GPUS={plan.parallelism.num_gpus_used}"
    minutes = f'"$(( (SLURM_JOB_END_TIME - $(date +%s)) / 60 - {_MINUTES_TO_SAVE} ))"'
    return rendered(
        name,
        command=command,
        comments=(command.comments + _first_run_note(command, started_by, spared)).rstrip("\n"),
        places=places,
        spared=spared,
        nodes=nodes,
        gpus=gpus,
        segment=segment_of(plan),
        job_name=slug(plan.model.name),
        has_arguments=has_arguments,
        arguments=shell_array("ARGUMENTS", command.arguments, command.words),
        first_run=_added(command.first_run),
        training_run=_added(command.training_run),
        exit_minutes=command.exit_minutes.format(minutes),
        fewer="" if last == gpus else f"{sizes}; [[ {rank} != {nodes - 1} ]] || GPUS={last}",
        start=_start(plan, command, rank),
        # also those that the launcher itself is given
        passed='"${ARGUMENTS[@]}" "$@"' if has_arguments else '"$@"',
        preflight=PREFLIGHT,
    )


def _start(plan: Plan, command: LaunchCommand, rank: str) -> str:
    """Shell text that starts the ranks of node `rank`; torchrun numbers them by the ranks that each node starts."""
    nodes, gpus, last = nodes_of(plan)
    count = str(gpus) if last == gpus else '"$GPUS"'
    if command.starts_ranks:
        return f"exec env NNODES={nodes} NODE_RANK={rank} GPUS_PER_NODE={count} {command.program}"
    binding = '${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"}'
    run = f"exec torchrun {binding} --nnodes {nodes} --nproc-per-node {count} --node-rank {rank}"
    return f'{run} --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" {command.program}'


def _first_run_note(command: LaunchCommand, started_by: str, spared: list[str]) -> str:
    """A comment that names the run to begin with."""
    if not command.promise:
        return ""
    without = f", without {', '.join(spared)}" if spared else ""
    return comment(
        f"first run: MOCK=1 {started_by} takes {FIRST_RUN_STEPS} steps{without}, and prints what the plan promises"
    )


def _added(part: RunPart) -> str:
    """Shell text that adds a part's arguments; empty where it has none."""
    if not (part.arguments or part.words):
        return ""
    splits = any(isinstance(value, ShellText) and '"' not in value for value in part.arguments.values())
    silenced = "# shellcheck disable=SC2206  # the words in the variable\n" if splits else ""
    return silenced + shell_array("ARGUMENTS+", part.arguments, part.words)


def shell_array(name: str, arguments: Mapping[str, Value], words: Iterable[str] = ()) -> str:
    """A bash array with one option, or one further word, a line, each quoted."""
    lines = [shell_words(argv({option: value})) for option, value in arguments.items()]
    lines += [shell_words([word]) for word in words]
    return "\n".join([f"{name}=(", *(f"  {line}" for line in lines), ")"])


CLAIM = Placeholder("claimName", "volume claim with data and checkpoints, mounted at /data", "training-data")
_MAX_CONFIG_MAP_BYTES = 1_000_000
"""etcd takes 1 MiB with everything around it."""
_RDMA = "rdma/rdma_shared_device_a"


def kubernetes_manifest(plan: Plan, command: LaunchCommand) -> ExportFile:
    """kubernetes.yaml: a TrainJob (Kubeflow Trainer 2, trainer.kubeflow.org/v1alpha1) and the runtime of its pods."""
    addresses = 'NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT"'
    return _manifest("kubernetes.yaml", plan, command, addresses)


def jobset_manifest(plan: Plan, command: LaunchCommand) -> ExportFile:
    """kubernetes-jobset.yaml: a JobSet (jobset.x-k8s.io/v1alpha2), one indexed job whose pods are the nodes."""
    # the name that JobSet gives the first pod, below the set's own
    first = f"{_object_name(plan)}-node-0-0.{_object_name(plan)}"
    return _manifest(
        "kubernetes-jobset.yaml", plan, command, f'NODE_RANK="$JOB_COMPLETION_INDEX" MASTER_ADDR="{first}"'
    )


def _object_name(plan: Plan) -> str:
    """The model's name as that of a Kubernetes object, which begins with a letter."""
    name = slug(plan.model.name)
    return name if name[0].isalpha() else f"job-{name}"


def _network_cards(plan: Plan) -> list[Placeholder]:
    """The resource of the network between nodes, by its kind; none on networks that pods have anyway."""
    row = network_of(plan) if plan.cluster.hardware.network else {"resource": _RDMA}
    if nodes_of(plan)[0] == 1 or (resource := row.get("resource")) is None:
        return []
    says = "EFA interfaces of a node: 32 on p5, 16 on p5e and p5en, 8 on p6-b200, 4 on p4d"
    is_efa = plan.cluster.hardware.network == "efa"
    return [Placeholder(resource, says if is_efa else "the cluster's RDMA resource", resource)]


def _manifest(filename: str, plan: Plan, command: LaunchCommand, addresses: str) -> ExportFile:
    """A manifest with all that pods read; `addresses` is shell text that says which node this is and where the first
    one is. SpecError where the files are larger than a ConfigMap may be.
    """
    files = (torchrun_script(plan, command), preflight(plan, command), *command.files)
    size = sum(len(file.text.encode()) for file in files)
    if size > _MAX_CONFIG_MAP_BYTES:
        raise SpecError(
            f"kubernetes: a ConfigMap holds 1 MiB, {', '.join(file.name for file in files)} are {size:,} bytes",
            "put the files on a shared volume and start launch.sh there",
        )
    nodes, gpus, _ = nodes_of(plan)
    cards = _network_cards(plan)
    text = rendered(
        filename,
        command=command,
        comments=command.comments.rstrip("\n"),
        name=_object_name(plan),
        nodes=nodes,
        gpus=gpus,
        vendor="amd.com/gpu" if plan.cluster.hardware.is_amd else "nvidia.com/gpu",
        cards=cards,
        claim=CLAIM,
        below=[CLAIM, *cards],
        segment=segment_of(plan),
        files=files,
        started=f'{addresses} exec bash /plan/{LAUNCH} "$@"',
    )
    return ExportFile(filename, text, placeholders=(*command.placeholders, CLAIM, *cards))


LARGE = 1024
"""Ranks from which NCCL waits longer for a link."""
_BY_THREADS = ("efa", "slingshot", "tcp")
"""Networks that no InfiniBand verbs drive, so that NCCL's variables for them mean nothing."""


def network_of(plan: Plan) -> Fields:
    """The row of the network between the plan's nodes; empty where nobody names its kind, or there is one node."""
    rows: dict[str, Fields] = shipped_table("export/networks.yaml") if _has_nodes(plan) else {}
    return rows.get(plan.cluster.hardware.network, {})


def variables(plan: Plan, *names: str) -> Named:
    """The variables of rows of settings.yaml that a plan has."""
    layout, network = plan.parallelism, plan.cluster.hardware.network
    has_nodes, has_verbs = _has_nodes(plan), network not in _BY_THREADS
    # priced behind compute
    overlaps_experts = layout.ep > 1 and plan.runtime_spec.overlaps_experts
    exchanges = runtime_of(plan).gradient_overlap_fraction > 0 and layout.dp * layout.cp > 1
    facts: Fields = {
        "has_nodes": has_nodes,
        "is_large": has_nodes and layout.num_gpus_used >= LARGE and has_verbs,
        "has_roce": has_nodes and has_verbs and network != "ib",
        # gradients or tokens are exchanged while layers run
        "beside_norms": overlaps_experts or exchanges,
        "overlaps_experts": overlaps_experts,
    }
    return {variable: value for name in names for variable, value in settings(name, plan, **facts).items()}


def _has_nodes(plan: Plan) -> bool:
    return plan.parallelism.num_gpus_used > plan.cluster.node_size


def node_environment(plan: Plan) -> Named:
    """The variables of a plan, whichever trainer runs it."""
    names = ("environment", *(("environment-amd",) if plan.cluster.hardware.is_amd else ()))
    of_network: Named = network_of(plan).get("environment", {})
    return variables(plan, *names) | of_network


def megatron_environment(plan: Plan) -> Named:
    """The variables of a plan."""
    is_amd = plan.cluster.hardware.is_amd
    names = ["environment-megatron-amd" if is_amd else "environment-megatron"]
    if not is_amd and switch_arguments(plan).get("--moe-flex-dispatcher-backend") == "hybridep":
        names.append("environment-hybridep")
    return variables(plan, "environment-connections") | node_environment(plan) | variables(plan, *names)


def primus_environment(plan: Plan) -> Named:
    """The variables that differ from what the launcher sets; under FSDP it also sets the number of queues."""
    own = variables(plan, "environment-primus") | network_of(plan).get("environment", {})
    return own if is_fsdp(plan) else {**variables(plan, "environment-connections"), **own}
