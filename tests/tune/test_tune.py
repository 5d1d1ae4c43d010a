"""The profiler of strategies, where its choices are kept, and that layers use them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import tokenloom as tl
from tests.cli.borrowed import borrowed
from tests.conftest import Ranks
from tests.support.defaults import caller_default
from tests.support.on_ranks import on_ranks
from tokenloom.backends.collective import CollectiveBackend, PreparedByCollective
from tokenloom.backends.seam import CombineKind, DispatchKind
from tokenloom.bench import setup
from tokenloom.cli import app
from tokenloom.comm.engine import Engine
from tokenloom.plan import Plan
from tokenloom.runtime import rank_group
from tokenloom.runtime.processes import RankContext, RankPool
from tokenloom.tune import choices, profiler
from tokenloom.tune.network.traffic import rows_between
from tokenloom.tune.profiler import CANDIDATES, WARM_UP_ROUNDS, Profile
from tokenloom.tune.samples import draw_topk_ids

pytestmark = pytest.mark.slow_on(4)

BF16 = torch.bfloat16
TOKENS, HIDDEN, INTERMEDIATE, TOP_K, NUM_EXPERTS = 13, 48, 32, 3, 8
SIZES = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": NUM_EXPERTS, "top_k": TOP_K, "dtype": BF16}
CHOSEN = tl.Strategy("all_to_all", "reduce_scatter")
"""What COSTS make best. Forward alone it would be all_gather and dedup."""
COSTS = {
    ("dispatch", "dedup"): 30.0,
    ("dispatch", "all_gather"): 10.0,
    ("dispatch", "all_to_all"): 24.0,
    ("combine", "dedup"): 100.0,
    ("combine", "reduce_scatter"): 115.0,
    ("combine", "all_to_all"): 120.0,
}
SCORES = {  # by hand: 64 and 48 for the GEMMs, which are as dear as their outputs are wide
    ("dispatch", "dedup"): 30 + 64 + 100,
    ("dispatch", "all_gather"): 10 + 64 + 115,
    ("dispatch", "all_to_all"): 24 + 64 + 100,
    ("combine", "dedup"): 48 + 100 + 30,
    ("combine", "reduce_scatter"): 48 + 115 + 10,
    ("combine", "all_to_all"): 48 + 120 + 30,
}
ITERATIONS = 6


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where choices are kept, in this process and in processes that it starts."""
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def use_folder(folder: Path) -> Any:
    """The same on a rank, whose process is older than the test."""
    return mock.patch.dict(os.environ, TOKENLOOM_CACHE_DIR=str(folder))


# -- measuring ------------------------------------------------------------------------------------------------------


class Meter:
    """A clock that shows made-up costs instead of the time, so that what is to come out is known.

    In each round another rank takes twice as long as the others, and in the warm-up and the first two rounds that
    count everybody takes a thousand times as long: what is the slowest rank's, and a median, does not notice.
    """

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.us = 0.0
        self.samples = 0

    def call_us(self, process_group: Any, device: torch.device, call: Any, queued: bool) -> float:
        self.us = 0.0
        call()
        number = self.samples // (3 * len(CANDIDATES))
        self.samples += 1
        slow = 2 if number % self.context.num_ranks == self.context.rank else 1
        return self.us * slow * (1000 if number < WARM_UP_ROUNDS + 2 else 1)

    def multiply(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert rows.shape[1] == weights.shape[1]
        self.us += weights.shape[2]
        return rows.new_empty(len(rows), weights.shape[2])

    @contextmanager
    def patched(self) -> Iterator[None]:
        def counted(name: str, operation: str) -> Any:
            real = getattr(Engine, name)

            def call(*args: Any, **options: Any) -> Any:
                """The strategy comes last, or in the options."""
                kinds = [arg._kind if isinstance(arg, PreparedByCollective) else arg for arg in args]
                given = [kind.options if isinstance(kind, DispatchKind | CombineKind) else kind for kind in kinds]
                (strategy,) = (
                    each for each in (getattr(arg, "strategy", arg) for arg in given) if isinstance(each, str)
                )
                self.us += COSTS[operation, strategy]
                return real(*args, **options)

            return mock.patch.object(Engine, name, call)

        with (
            mock.patch.object(profiler, "call_us", self.call_us),
            mock.patch.object(profiler, "gemms_for", return_value=self),
            counted("send_dispatch", "dispatch"),
            counted("send_combine", "combine"),
            counted("prepare_combine", "combine"),
            counted("combine_gradient", "dispatch"),
        ):
            yield


def profile_by_meter(context: RankContext, folder: Path, **options: Any) -> Profile:
    defaults = {"num_tokens": TOKENS, "backend": "collective", "iterations": ITERATIONS, "max_vio": 1.0}
    with use_folder(folder), Meter(context).patched():
        return tl.tune.profile(context.group, device=context.device, **(SIZES | defaults | options))


def test_numbers(ranks: Ranks, tmp_path: Path) -> None:
    """Of every strategy; by the slowest rank of each sample; the same on all ranks. The least score wins, which counts
    the gradient."""
    found = ranks.run(profile_by_meter, tmp_path)
    assert all(each == found[0] for each in found)
    assert [(row.operation, row.strategy) for row in found[0].rows] == list(CANDIDATES)
    for row in found[0].rows:
        who = row.operation, row.strategy
        gradient = SCORES[who] - COSTS[who] - (64 if row.operation == "dispatch" else 48)
        assert row.score_ms == pytest.approx(2 * SCORES[who] / 1e3), who
        assert row.alone_ms == pytest.approx(2 * COSTS[who] / 1e3)
        assert row.gradient_ms == pytest.approx(2 * gradient / 1e3)
        assert row.with_gemm_ms == pytest.approx(row.score_ms - row.gradient_ms)
        assert row.wins == (getattr(CHOSEN, row.operation) == row.strategy)
    assert found[0].strategy == CHOSEN
    assert (found[0].setting.num_ranks, found[0].setting.tokens) == (ranks.num_ranks, 16)
    lines = str(found[0]).splitlines()
    (line,) = (line for line in lines if line.startswith("dispatch all_to_all"))
    assert line.split()[2:6] == ["0.176", "0.048", "0.200", "0.376"]
    assert [line.split()[1] for line in lines if "winner" in line] == ["all_to_all", "reduce_scatter"]


def test_equal_scores() -> None:
    """One winner: the first, which is the default."""
    sample = {"with_gemm": [1.0], "alone": [1.0], "gradient": [1.0]}
    rows = profiler.make_rows([dict.fromkeys(CANDIDATES, sample)], dict.fromkeys(CANDIDATES, 1))
    assert [(row.operation, row.strategy) for row in rows if row.wins] == [("dispatch", "dedup"), ("combine", "dedup")]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_what_is_not_measured_between_nodes_is_said(num_nodes: int) -> None:
    """On one node per_node is dedup by another name."""
    sample = {"with_gemm": [1.0], "alone": [1.0], "gradient": [1.0]}
    rows = profiler.make_rows([dict.fromkeys(CANDIDATES, sample)], dict.fromkeys(CANDIDATES, 1))
    found = Profile(own_setting(num_ranks=4, num_nodes=num_nodes), TOKENS, 0.0, 1, rows, None)
    said = re.search(r"combine +per_node( +-){5} +not measured", str(found))
    assert (said is not None) == (num_nodes > 1)


def bytes_sent(context: RankContext) -> dict[Any, int]:
    """Bytes that one call of each strategy gives to collectives for other ranks."""
    sent, payload_bytes = 0, TOKENS * HIDDEN * 2
    real_scatter, real_gather = dist.all_to_all_single, rank_group.gather_all

    def scatter(out: torch.Tensor, given: torch.Tensor, received: Any, sizes: list[int], **options: Any) -> Any:
        nonlocal sent
        sent += sum(size for rank, size in enumerate(sizes) if rank != context.rank) * given[:1].nbytes
        return real_scatter(out, given, received, sizes, **options)

    def gather(out: torch.Tensor, row: torch.Tensor, **options: Any) -> Any:
        nonlocal sent
        if row.nbytes == payload_bytes:  # others are exchanges of counts
            sent += (context.num_ranks - 1) * payload_bytes
        return real_gather(out, row, **options)

    plan = (NUM_EXPERTS, HIDDEN, TOP_K, TOKENS)
    names = ("num_experts", "hidden", "top_k", "max_tokens_per_rank")
    options: dict[str, Any] = {"device": context.device, "backend": "collective"}
    found = {}
    with tl.Communicator(context.group, **dict(zip(names, plan, strict=True)), **options) as comm:
        calls = profiler._Transfers(comm, INTERMEDIATE, BF16, max_vio=1.5).calls()
        for who, its in calls.items():
            with (
                mock.patch.object(dist, "all_to_all_single", scatter),
                mock.patch.object(rank_group, "gather_all", gather),
            ):
                sent = 0
                its["alone"]()
            found[who] = sent
    return found


@pytest.mark.parametrize("default", ["meta", torch.float64], ids=str)
def test_draws_do_not_depend_on_the_callers_defaults(default: str | torch.dtype) -> None:
    """The same seed gives the same routes in every program."""
    shape: dict[str, Any] = {"rank": 1, "num_tokens": 50, "num_experts": 16, "top_k": 3}
    draw = partial(draw_topk_ids, **shape, max_vio=1.2, masked_ratio=0.3)
    want = draw()
    with caller_default(default):
        found = draw()
    assert found.device.type == "cpu"
    assert torch.equal(found, want)


def test_bytes_are_those_that_travel(ranks: Ranks, tmp_path: Path) -> None:
    """Counted at the collectives, on the busiest rank; and it is they that the table's GB/s are of."""
    by_rank = ranks.run(bytes_sent)
    plan = Plan(ranks.num_ranks, NUM_EXPERTS, HIDDEN, TOP_K, TOKENS)
    ids = [draw_topk_ids(rank, TOKENS, NUM_EXPERTS, TOP_K, max_vio=1.5) for rank in range(ranks.num_ranks)]
    rows = torch.from_numpy(rows_between(ids, plan.experts_per_rank, plan.num_ranks))
    holders = [torch.bincount(each.flatten() // plan.experts_per_rank, minlength=plan.num_ranks) for each in ids]
    expected = profiler.sent_bytes(plan, rows, torch.stack(holders), BF16)
    assert {who: max(each[who] for each in by_rank) for who in by_rank[0]} == expected
    assert ranks.num_ranks == 1 or len(set(expected.values())) > 3, "else this would not tell one from another"
    for row in ranks.run(profile_by_meter, tmp_path, max_vio=1.5)[0].rows:
        sent = row.physical_gbytes_per_s * row.alone_ms * 1e6
        assert sent == pytest.approx(expected[row.operation, row.strategy])


def profile_with_few(context: RankContext, folder: Path, dispatches: tuple[str, ...]) -> Profile:
    few = replace(
        CollectiveBackend.capabilities, dispatch_strategies=dispatches, combine_strategies=("dedup", "all_to_all")
    )
    with mock.patch.object(CollectiveBackend, "capabilities", few), use_folder(folder):
        options: dict[str, Any] = {"num_tokens": TOKENS, "iterations": 1, "backend": "collective"}
        return tl.tune.profile(context.group, device=context.device, **options, **SIZES)


@pytest.mark.parametrize("dispatches", [("dedup",), ("dedup", "all_gather")], ids=" ".join)
def test_a_backend_that_has_few(ranks: Ranks, tmp_path: Path, dispatches: tuple[str, ...]) -> None:
    """What it lacks is said in the table and never wins, and the ranks stay in step. The gradient of all_gather is
    carried by reduce_scatter, so one is worth nothing without the other."""
    found = ranks.run(profile_with_few, tmp_path, dispatches)
    missing = [(row.operation, row.strategy) for row in found[0].rows if row.score_ms is None]
    assert missing == [("dispatch", "all_gather"), ("dispatch", "all_to_all"), ("combine", "reduce_scatter")]
    assert str(found[0]).count("not on this backend") == 3
    assert found[0].strategy.dispatch == "dedup"
    assert all(each == found[0] for each in found)


def refuse(context: RankContext, folder: Path) -> None:
    with pytest.raises(tl.InvalidArgument, match="strategy is 'dedup', this backend has"):
        profile_with_few(context, folder, ())
    for options, said in (
        ({"intermediate": 0}, "intermediate is 0"),
        ({"iterations": 0}, "iterations is 0"),
        ({"max_vio": -1.0}, "max_vio is -1"),
        ({"top_k": 9}, "top_k is 9"),
        ({"num_experts": 7}, "num_experts is 7" if 7 % context.num_ranks else None),
    ):
        if said is not None:
            with pytest.raises(tl.InvalidArgument, match=said):
                profile_by_meter(context, folder, **options)
    if context.num_ranks > 1:
        with pytest.raises(tl.PlanMismatch, match="max_vio"):
            profile_by_meter(context, folder, max_vio=context.rank / 4)


def test_what_cannot_be_measured(ranks: Ranks, tmp_path: Path) -> None:
    """Raised on all ranks; whatever fails for another reason than a strategy that is missing is no line of a table."""
    ranks.run(refuse, tmp_path)
    assert [file for file in tmp_path.iterdir() if file.suffix != ".kernel"] == []  # GPUs have compiled some by then


def profile_on_kernels(context: RankContext, folder: Path) -> Profile:
    with use_folder(folder):
        sizes = {**SIZES, "hidden": 256}
        return tl.tune.profile(context.group, num_tokens=64, iterations=3, backend="nvlink", **sizes)


def test_on_nvlink(hoppers: Ranks, tmp_path: Path) -> None:
    """By events on GPUs."""
    found = hoppers.run(profile_on_kernels, tmp_path)
    measured = [(row.operation, row.strategy) for row in found[0].rows if row.score_ms is not None]
    assert measured == list(profiler.CANDIDATES)
    assert all(each == found[0] for each in found)
    assert found[0].setting.device_name == torch.cuda.get_device_name()


# -- what is kept ---------------------------------------------------------------------------------------------------


def make_layer(process_group: Any = None, **options: Any) -> tl.ExpertParallelMoE:
    sizes = SIZES | {"max_tokens_per_rank": TOKENS, "backend": "collective"}
    return tl.ExpertParallelMoE(process_group, **(sizes | options))


def like_a_communicator(plan: Plan, device: Any, num_nodes: int = 1) -> Any:
    ranks = SimpleNamespace(topology=SimpleNamespace(num_nodes=num_nodes))
    return SimpleNamespace(plan=plan, backend="collective", device=device, engine=SimpleNamespace(ranks=ranks))


def own_setting(num_ranks: int = 1, tokens: int = TOKENS, device: Any = "cpu", num_nodes: int = 1) -> choices.Setting:
    plan = Plan(num_ranks, NUM_EXPERTS, HIDDEN, TOP_K, tokens)
    return choices.setting_of(like_a_communicator(plan, device, num_nodes), INTERMEDIATE, BF16)


def strategies_of_layers(context: RankContext, folder: Path) -> list[tl.Strategy]:
    """Of a layer of the profiled shape, one with another number of tokens in the same bucket, and one told by hand."""
    with use_folder(folder):
        options: list[dict[str, Any]] = [{}, {"max_tokens_per_rank": 9}, {"strategy": tl.Strategy("all_gather")}]
        layers = [make_layer(context.group, device=context.device, **each) for each in options]
        others = [{"max_tokens_per_rank": 17}, {"intermediate": 40}, {"dtype": torch.float32}, {"top_k": 2}]
        for each in others:
            assert make_layer(context.group, device=context.device, **each).experts.strategy == tl.Strategy(), each
    x = torch.ones(5, HIDDEN, dtype=BF16, device=context.device, requires_grad=True)
    layers[0](x)[0].sum().backward()
    assert x.grad is not None
    return [layer.experts.strategy for layer in layers]


def test_layers_use_the_choice(ranks: Ranks, tmp_path: Path) -> None:
    """Of this shape alone, on all ranks, and not where the user has said something else."""
    kept = ranks.run(profile_by_meter, tmp_path)[0].file
    assert Path(kept).parent == tmp_path
    for found in ranks.run(strategies_of_layers, tmp_path):
        assert found == [CHOSEN, CHOSEN, tl.Strategy("all_gather")]


def on_disks_of_their_own(context: RankContext, folder: Path, by_rank: list[tl.Strategy | None]) -> tl.Strategy:
    with use_folder(folder / str(context.rank)):
        mine = by_rank[min(context.rank, 1)]
        if mine is not None:
            choices.keep(own_setting(context.num_ranks, device=context.device), mine)
        return make_layer(context.group, device=context.device).experts.strategy


@pytest.mark.parametrize("rank0s", [CHOSEN, None], ids=["found", "none"])
@pytest.mark.parametrize("others", [tl.Strategy("all_gather"), None], ids=["others found", "others none"])
def test_rank_0_decides(ranks: Ranks, tmp_path: Path, rank0s: tl.Strategy | None, others: tl.Strategy | None) -> None:
    """Ranks that see different disks must not travel by different strategies."""
    found = ranks.run(on_disks_of_their_own, tmp_path, [rank0s, others])
    assert found == [rank0s or tl.Strategy()] * ranks.num_ranks


@on_ranks
def test_a_hand_written_choice_is_everybodys(context: RankContext) -> None:
    """Even the default: without a strategy the others would go by what is on a disk."""
    if context.num_ranks > 1:
        with pytest.raises(tl.PlanMismatch, match="strategy"):
            make_layer(context.group, device=context.device, strategy=None if context.rank else tl.Strategy())


@pytest.mark.parametrize(
    ("field", "value"),
    [("device_name", "another GPU"), ("num_ranks", 8), ("torch", "1.0"), ("tokenloom", "0.0"), ("backend", "nvlink")],
)
def test_a_choice_made_elsewhere(field: str, value: Any, folder: Path) -> None:
    """Is not used, and what differs is said; another shape is nobody's business."""
    ours = own_setting()
    file = choices.keep(replace(ours, **{field: value}), CHOSEN)
    said = re.escape(f"({field} {value}, here {getattr(ours, field)})")
    with pytest.warns(UserWarning, match=f"ignored.*{said}") as warned:
        layer = make_layer()
    assert str(file) in str(warned[0].message)
    assert layer.experts.strategy == tl.Strategy()
    assert choices.find(replace(ours, hidden=64)) is None  # a warning would be an error
    choices.keep(ours, tl.Strategy("all_gather"))
    assert make_layer().experts.strategy == tl.Strategy("all_gather")


DAMAGE = {
    "empty": lambda text: b"",
    "cut off": lambda text: text[: len(text) // 2],
    "not text": lambda text: b"\xff\xfe" + text,
    "another thing": lambda text: b"[1, 2]",
    "unknown strategy": lambda text: text.replace(b"all_to_all", b"by_pigeon"),
    "a field less": lambda text: text.replace(b'"backend": "collective",', b""),
    "another setting": lambda text: text.replace(b'"hidden": 48', b'"hidden": 56'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file(damage: str, folder: Path) -> None:
    """Is named and ignored, and the next choice replaces it."""
    file = choices.keep(own_setting(), CHOSEN)
    assert file is not None
    assert choices.find(own_setting()) == CHOSEN
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[damage](whole))
    assert file.read_bytes() != whole
    with pytest.warns(UserWarning, match=f"{re.escape(str(file))} is damaged and ignored"):
        assert make_layer().experts.strategy == tl.Strategy()
    choices.keep(own_setting(), CHOSEN)
    assert make_layer().experts.strategy == CHOSEN


def test_the_folder_serves_kernels_too(folder: Path) -> None:
    """Whose cache uses none that others can write to."""
    before = os.umask(0o002)
    try:
        choices.keep(own_setting(), CHOSEN)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_others_may_read_a_choice(folder: Path) -> None:
    """As they may run kernels, which lie beside it: root makes both in an image."""
    before = os.umask(0o077)
    try:
        file = choices.keep(own_setting(), CHOSEN)
    finally:
        os.umask(before)
    assert file is not None
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_file_that_cannot_be_read(folder: Path) -> None:
    """Is ignored, and not called damaged."""
    file = choices.keep(own_setting(), CHOSEN)
    refused = mock.patch.object(Path, "read_text", side_effect=PermissionError(13, "Permission denied"))
    said = f"^{re.escape(str(file))} cannot be read \\(Permission denied\\) and is ignored"
    with refused, pytest.warns(UserWarning, match=said):
        assert choices.find(own_setting()) is None


def test_files_are_whole_or_absent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where writing fails, what was there stays, and nothing half-written beside it."""
    choices.keep(own_setting(), CHOSEN)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full_disk(*names: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    assert choices.keep(own_setting(), tl.Strategy()) is None
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_nowhere_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No obstacle: the choice is not kept, and layers look in vain."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert choices.keep(own_setting(), CHOSEN) is None
    assert make_layer().experts.strategy == tl.Strategy()
    found = tl.tune.profile(num_tokens=TOKENS, iterations=1, backend="collective", device="cpu", **SIZES)
    assert found.file is None


def test_tokens_are_rounded_up() -> None:
    """To powers of two, so that a batch that is a little smaller finds the choice."""
    assert [own_setting(tokens=tokens).tokens for tokens in (1, 2, 3, 8, 9, 4096)] == [1, 2, 4, 8, 16, 4096]


def test_nodes_are_told_apart(folder: Path) -> None:
    """What is best inside of a node may not be between two."""
    choices.keep(own_setting(num_ranks=4), CHOSEN)
    assert choices.find(own_setting(num_ranks=4)) == CHOSEN
    with pytest.warns(UserWarning, match="num_nodes 1, here 2"):
        assert choices.find(own_setting(num_ranks=4, num_nodes=2)) is None


# -- the command and the documents ----------------------------------------------------------------------------------


def tune_command(*arguments: str) -> Any:
    """What the command says for the layer of these tests, on two ranks."""
    sizes = ["--tokens", "13", "--hidden", "48", "--intermediate", "32", "--num-experts", "8", "--top-k", "3"]
    return CliRunner().invoke(app.app, ["tune", *sizes, "--device", "cpu", "--ranks", "2", *arguments])


def test_the_command(folder: Path, tmp_path: Path, pools: Callable[[str], RankPool]) -> None:
    """It prints a table, keeps the choice for layers on two ranks, and writes rows with their setup."""
    with borrowed(setup, pools):
        done = tune_command("--max-vio", "0.5", "--iterations", "2", "--json", str(tmp_path / "rows.json"))
    assert done.exit_code == 0, done.output
    said = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["operation"], row["strategy"]) for row in said["rows"]] == list(CANDIDATES)
    assert all(row["alone_ms"] > 0 and row["score_ms"] > row["with_gemm_ms"] > 0 for row in said["rows"])
    setting = own_setting(num_ranks=2)
    assert asdict(setting).items() <= said["setup"].items()
    assert (said["setup"]["max_vio"], said["setup"]["iterations"]) == (0.5, 2)
    winners = {row["operation"]: row["strategy"] for row in said["rows"] if row["wins"]}
    assert choices.find(setting) == tl.Strategy(**winners)
    assert f"kept in {folder / setting.file_name}" in " ".join(done.output.split())
    assert done.output.count("winner") == 2
    for row in said["rows"]:
        assert re.search(rf"{row['operation']} +{row['strategy']} +{row['with_gemm_ms']:.3f} ", done.output)


def test_a_choice_that_cannot_be_kept(
    pools: Callable[[str], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command shows what it found, and fails: layers would not find the choice."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path / "file"))
    with borrowed(setup, pools):
        done = tune_command("--iterations", "1")
    assert done.exit_code == 1
    assert "winner" in done.stdout
    assert f"could not be kept: {tmp_path / 'file'} cannot be written" in " ".join(done.output.split())
