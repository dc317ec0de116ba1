"""A rank's step made into a trace from an account of it: each second stands where the account has it."""

from planner.observe.accounts import (
    ATTENTION,
    COPIES,
    DATA,
    EXCHANGES,
    HOST_GAPS,
    MEMORY_BOUND,
    OPTIMIZER,
    OTHER,
    PIPELINE,
    PRODUCTS,
    WAITS,
    Account,
)
from tests.made_traces import ALL_REDUCE, GEMM, SEND_RECV, MadeTrace
from tests.made_traces import ATTENTION as ATTENTION_KERNEL

US = 1e6
NAMES = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP", "cp": "CONTEXT_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP", "pp": "PIPELINE_MODEL_PARALLEL_GROUP", "world": "default_pg",
}  # fmt: skip
KERNELS = {
    ATTENTION: ATTENTION_KERNEL, MEMORY_BOUND: "triton_poi_fused_add_0",
    OPTIMIZER: "multi_tensor_apply_kernel<AdamFunctor>", OTHER: "a_kernel_of_no_pattern",
}  # fmt: skip
STEPS = (3, 4)


def trace_of(
    account: Account,
    rank: int = 0,
    world_size: int = 8,
    groups: dict[str, list[int]] | None = None,
    late: dict[str, float] | None = None,
) -> MadeTrace:
    """Two equal steps of the account; the rank comes `late` to its exchanges of a group by so many seconds.

    `groups` has the ranks of each group; a group that is not named has the first two ranks.
    """
    ranks = {name: (groups or {}).get(name, [0, 1]) for name in NAMES}
    trace = MadeTrace(rank, world_size, {str(i): (NAMES[name], ranks[name]) for i, name in enumerate(NAMES)})
    number_of = {name: str(i) for i, name in enumerate(NAMES)}
    length = account.total_s * US
    for count, number in enumerate(STEPS):
        start = count * length
        trace.step(number, start, length)
        _Step(trace, start, number_of, late or {}).run(account)
    return trace


class _Step:
    """One step, written from its begin to its end."""

    def __init__(self, trace: MadeTrace, start: float, number_of: dict[str, str], late: dict[str, float]) -> None:
        self.trace, self.start, self.at, self.number_of, self.late = trace, start, start, number_of, late

    def run(self, account: Account) -> None:
        parts = dict(account.parts)
        computing = [(GEMM, parts[PRODUCTS]), *((name, parts.get(part, 0.0)) for part, name in KERNELS.items())]
        for group, one in account.exchanges.items():
            # what hides runs beside kernels, what shows behind them
            late_s = self.late.get(group, 0.0)
            self.collective(group, self.at + late_s * US, (one.busy_s - late_s) * US)
            self.compute(computing, one.hidden_s)
            self.at += (one.busy_s - one.hidden_s) * US
        self.compute(computing, sum(seconds for _, seconds in computing))
        waited_s = sum(parts.get(name, 0.0) for name in (PIPELINE,))
        if waited_s:
            self.collective("pp", self.at, waited_s * US, SEND_RECV, "send")
            self.at += waited_s * US
        if parts.get(COPIES):
            self.trace.add("gpu_memcpy", "Memcpy DtoH", self.at, parts[COPIES] * US, 7)
            self.at += parts[COPIES] * US
        if parts.get(EXCHANGES):
            self.collective("world", self.at, parts[EXCHANGES] * US)
            self.at += parts[EXCHANGES] * US
        self.at += parts.get(WAITS, 0.0) * US
        self.kernel(GEMM, 1e-9)
        if parts.get(DATA):
            self.trace.add("user_annotation", "enumerate(DataLoader)#__next__", self.at, parts[DATA] * US, 1)
            self.at += parts[DATA] * US
        # the host launches what comes next when the GPU has run dry; it ends the step
        self.at += parts.get(HOST_GAPS, 0.0) * US
        self.kernel(GEMM, 1e-9, launch=self.at - 1e-3)

    def compute(self, queue: list[tuple[str, float]], seconds: float) -> None:
        """Run the first kernels of the queue for so long."""
        while seconds > 1e-12:
            name, left_s = queue.pop(0)
            self.kernel(name, min(left_s, seconds))
            if left_s > seconds:
                queue.insert(0, (name, left_s - seconds))
            seconds -= left_s

    def kernel(self, name: str, length_s: float, launch: float | None = None) -> None:
        if length_s > 0:
            self.trace.kernel(name, self.at, length_s * US, self.start if launch is None else launch)
            self.at += length_s * US

    def collective(
        self, group: str, start: float, length: float, name: str = ALL_REDUCE, kind: str = "allreduce"
    ) -> None:
        self.trace.collective(start, length, self.start, self.number_of[group], name, kind)
