"""`plan validate`: predictions beside published runs, the choice among their layouts, and the gains of switches."""

from __future__ import annotations

import logging
from pathlib import Path

from planner.cli.options import Word
from planner.cli.output import tell, waiting
from planner.errors import PlannerError, SpecError

_log = logging.getLogger(__name__)


def validate_command(
    family: Word = None,
    regret: bool = False,
    add: Word = None,
    history: Word = None,
    json: bool = False,
) -> None:
    """Hold the planner against published training runs, or against your own.

    \b
    Example:
      plan validate
      plan validate --family korthikanti
      plan validate --family ablations
      plan validate --regret
      plan validate --add observed.json
    """
    if add is not None or history is not None:
        _keep(add, history, json, alone=not (family or regret))
        return
    from planner.report import accuracy
    from planner.validate.choices import priced_pairs
    from planner.validate.rows import load_rows
    from planner.validate.score import evaluate_rows

    rows = load_rows()
    families = [*dict.fromkeys(row.family for row in rows), accuracy.PAIRS]
    if family is not None and family not in (*families, "all"):
        raise SpecError(f"--family: {family!r} is unknown", f"one of {', '.join(families)}, all")
    if family == accuracy.PAIRS:
        if regret:
            raise SpecError(f"--family {family}: has no --regret", "leave them out, or name another family")
        with waiting("pricing pairs of runs"):
            pairs = priced_pairs()
        tell(accuracy.pairs_json(pairs) if json else accuracy.render_pairs(pairs))
        return
    with waiting("pricing published runs"):
        scored = evaluate_rows([row for row in rows if family in (None, "all", row.family)])
        pairs = [] if family or regret else priced_pairs()
    if regret:
        tell(accuracy.regret_json(scored) if json else accuracy.render_regret(scored, family is not None))
    else:
        tell(accuracy.agreement_json(scored, pairs) if json else accuracy.render_agreement(scored, pairs))


def _keep(path: str | None, folder: str | None, json: bool, alone: bool) -> None:
    """Keep an observed run in the folder of the user's runs, and show those of its cluster and trainer; SpecError where
    another question is asked beside it, or none is named."""
    if path is None:
        raise SpecError("--history: without --add, no run is kept", "plan validate --add observed.json --history DIR")
    if not alone:
        raise SpecError("--add: stands beside other questions", "ask for them without --add")
    from planner.cli.measurements import refuse_device
    from planner.observe import history
    from planner.observe.judge import read_observed
    from planner.report.accuracy import kept_json, render_kept
    from planner.specs.reading import label

    where, place = label(path), _folder(folder)
    observed = read_observed(path)
    run, left_out = history.kept_run(observed, where)
    cluster, runtime, name = run.plan.cluster, run.plan.runtime_spec, history.name_of(observed)
    refuse_device(observed, cluster.hardware, where)
    history.price_of(run, where)  # a run that teaches nothing is refused before anything is written
    is_new = history.keep(place, name, history.text_of(run))
    prices = history.prices_of(place, history.price_of_file)
    for sentence in (*(f"{where}: {text}" for text in left_out), history.said_of(prices.left_out, place)):
        if sentence:
            _log.warning("%s", sentence)
    kept = history.runs_of(prices, cluster, runtime)
    known = history.calibration_of(kept, cluster, place)
    if known is None:
        raise PlannerError(f"{place}: the run is gone again", "add it once more")
    draw = kept_json if json else render_kept
    tell(draw(place, name, is_new, history.belongs_to(cluster, runtime), kept, known[1]))


def _folder(given: str | None) -> Path:
    from planner.observe import VARIABLE, folder_of

    folder = folder_of(given)
    if folder is None:
        raise SpecError("--history: there is no home folder to keep runs in", f"--history DIR, or {VARIABLE}=DIR")
    return folder
