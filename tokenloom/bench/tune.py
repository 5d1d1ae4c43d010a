"""Runs ``tokenloom tune``: measures rates and strategies on its own ranks, shows them and where it keeps them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from tokenloom import env
from tokenloom.backends import registry
from tokenloom.bench import legends
from tokenloom.bench.harness import limit_s
from tokenloom.bench.setup import TRANSPORTS, Run
from tokenloom.bench.tables import make_table, say
from tokenloom.bench.workload import DTYPES, CallSizes
from tokenloom.errors import ImplausibleRates
from tokenloom.runtime.processes import RankContext
from tokenloom.tune.profiler import Profile, profile
from tokenloom.tune.rates import MeasuredRates, measure_rates


def run_tune(run: Run, shape: CallSizes, *, intermediate: int, dtype: str, backend: str, iterations: int) -> bool:
    """Measure, print a table, keep what was found, write the file that was asked for; return whether all was kept.

    Rates of the machine come first, where calls go by them: strategies are then measured with the SMs that follow.
    """
    transport, device, sizes = TRANSPORTS[run.device], torch.device(run.device), shape.plan(run.num_ranks)
    here = registry.availability(transport, device, sizes, DTYPES[dtype], name=backend)
    name, _ = registry.choose(backend, [here])  # or a rank would say it, with its traceback
    rates: MeasuredRates | str | None = None
    options: dict[str, Any] = {"intermediate": intermediate, "dtype": DTYPES[dtype], "backend": backend}
    options |= {"iterations": iterations, "limit_s": limit_s(iterations)}
    with run.ranks() as (pool, _):
        if registry.capabilities(name).has_rates:
            rates = pool.run(rates_on_rank)[0]
            run.say(str(rates))
        found = pool.run(profile_on_rank, **asdict(shape), **options)[0]
    run.say(str(found).partition("\n\n")[0])
    run.show(table(found), keys=2)
    run.say(legends.TUNE)
    lost = f"could not be kept: {env.cache_folder()} cannot be written"
    chosen = f"dispatch {found.strategy.dispatch}, combine {found.strategy.combine}"
    say(run.console, f"{chosen}: {f'kept in {found.file}, where layers find it' if found.file else lost}")
    setup, are_kept = run.setup() | asdict(found.setting), not isinstance(rates, str)
    if isinstance(rates, MeasuredRates):
        are_kept, setup["rates"] = rates.file is not None, asdict(rates)
        say(run.console, f"rates: {f'kept in {rates.file}, where communicators find them' if are_kept else lost}")
    setup |= {name: getattr(found, name) for name in ("num_tokens", "max_vio", "iterations")}
    missing = [f"{row.strategy} of {row.operation}" for row in found.rows if row.score_ms is None]
    run.keep(setup, [f"not on backend {found.setting.backend}: {each}" for each in missing], found.rows)
    return found.file is not None and are_kept


def table(found: Profile) -> Table:
    """The rows, for people."""
    timed = ("with GEMM\nms", "alone\nms", "gradient\nms", "score\nms", "GB/s")
    return make_table(("operation", "strategy", *timed, ""), found.cells(), left=(0, 1, 7))


def rates_on_rank(context: RankContext) -> MeasuredRates | str:
    """Measure rates on one rank, or say why they are not kept. Collective."""
    try:
        return measure_rates(context.group, device=context.device)
    except ImplausibleRates as error:
        return f"no rates are kept: {error}"


def profile_on_rank(context: RankContext, **options: Any) -> Profile:
    """Profile on one rank. Collective."""
    return profile(context.group, device=context.device, **options)
