"""python -m tools.calibrate kernels [GPU] | runs [FAMILY ...]: refit what is calibrated (docs/CALIBRATION.md).

`kernels` refits an efficiency block to the measured tables of tools/calibrate/data, `runs` what single GPUs do not show
to the published runs of planner/validate/data. The results go by hand into hardware_profiles/*.yaml and
planner/trainers/data/*.yaml, each with its source. Both print residuals in sample and with whole groups left out, and
need no GPU: seconds, and half an hour.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from planner.errors import SpecError
from tools import exit_code_of


def main(arguments: Sequence[str]) -> None:
    """Fit what the first argument names."""
    match arguments:
        case ["kernels", *rest]:
            from tools.calibrate.kernels import main as fit
        case ["runs", *rest]:
            from tools.calibrate.runs import main as fit
        case _:
            raise SpecError("tools.calibrate: say what to fit", "kernels [GPU] or runs [FAMILY ...]")
    fit(rest)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
