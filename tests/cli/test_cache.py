"""``tokenloom cache``, with a cache folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner, Result

import tokenloom as tl
from tests.support.small_kernels import needs_nvrtc
from tests.support.stand_ins import StandIns
from tokenloom.cli import app, kernel_cache
from tokenloom.cli.terminal import MISUSED
from tokenloom.jit import cache, compiler, kernel
from tokenloom.jit.cache import Entry
from tokenloom.jit.compiler import KernelSpec
from tokenloom.plan import Plan

ROOT = Path(__file__).parents[2]
ALL_VARIANTS = kernel_cache.variants
LIMIT_S = 300.0
PLAN = Plan(2, 4, 128, 2, 16)
"""A shape whose rows every dtype can have."""
NUM_VARIANTS = 22 + 10 + 15 + 2 * 24 + 3 + 2 + 6 + 1
"""Kernels of that shape.

Dispatches: 2-byte, 4-byte and FP8 rows, and rows that become FP8 with two kinds of scale, in three layouts and by
all_to_all; 2-byte and 4-byte rows by all_gather; the same rows and further orders of scales in layout slots. Staged
ones: all that go to slots, and the same rows by expert. Combines, of both sizes: BF16, FP16 and FP32 in
two layouts, and in a third by both modes with three kinds of weights; of either size dense ones of three dtypes, and
gradients of weights with two layouts. Pre-reductions: three dtypes, with weights and without. The barrier."""
SMALL = ("--num-ranks", "2", "--num-experts", "4", "--hidden", "4", "--top-k", "1")
"""A shape whose rows only FP32 can have, so that it has few kernels."""
NUM_SMALL = 28
LARGER = ("--num-ranks", "2", "--num-experts", "4", "--hidden", "128", "--top-k", "2")
"""That of PLAN."""
BUILT = {"dispatch": 1, "combine": 2, "pre_reduce": 1}
"""Kernels of that shape that are really compiled here, by name."""
NUM_BUILT = sum(BUILT.values())


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, in this process: nothing in it depends on a process of its own."""

    def say(folder: Path, *arguments: str) -> Result:
        monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(folder))
        return CliRunner().invoke(app.app, ["cache", *arguments])

    return say


def few_variants(plan: Plan) -> list[KernelSpec]:
    """The first of the kernels that a build compiles, BUILT of each name: compiling takes time."""
    specs = ALL_VARIANTS(plan)
    return [spec for name, count in BUILT.items() for spec in [s for s in specs if s.name == name][:count]]


@pytest.fixture(scope="module")
def first_build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder that was filled once, and what was said then. Tests that change it copy it."""
    folder = tmp_path_factory.mktemp("kernels") / "cache"
    environment = {"TOKENLOOM_CACHE_DIR": str(folder)}
    with mock.patch.object(kernel_cache, "variants", few_variants):
        return folder, CliRunner().invoke(app.app, ["cache", "build", *SMALL], env=environment)


@pytest.fixture
def filled(first_build: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(first_build[0], tmp_path / "cache"))


def made_entry(key: str = "ab" * 16, shared_bytes: int = 0, **shape: int) -> Entry:
    log = "8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nUsed 40 registers, 256 bytes smem"
    return Entry(key, "mixer", shape, "sm_90a", 128, shared_bytes, b"code" * 512, log)


def entry_of(spec: KernelSpec) -> Entry:
    """What a build keeps of a kernel, without compiling it."""
    return Entry("ab" * 16, spec.name, dict(spec.shape), spec.arch, spec.threads, spec.shared_bytes, b"", "")


@needs_nvrtc
def test_build_compiles_once(first_build: tuple[Path, Result], filled: Path, say: Callable[..., Result]) -> None:
    """A build needs no GPU. The second time all is there, and nothing else is in the folder."""
    folder, done = first_build
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.fullmatch(rf"{NUM_BUILT} compiled in [\d.]+ s, 0 were there, in {re.escape(str(folder))}\n", done.stdout)
    assert len(list(folder.glob("*.kernel"))) == len(list(folder.iterdir())) == NUM_BUILT
    with mock.patch.object(kernel_cache, "variants", few_variants):
        done = say(filled, "build", *SMALL)
    assert re.match(rf"0 compiled in [\d.]+ s, {NUM_BUILT} were there", done.stdout)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "number"),
    [
        pytest.param(SMALL, NUM_SMALL, id="small"),
        pytest.param(LARGER, NUM_VARIANTS, id="all dtypes", marks=pytest.mark.full),  # tests/kernels compiles the like
    ],
)
def test_build_of_every_variant_as_a_process(sizes: Sequence[str], number: int, tmp_path: Path) -> None:
    """As a user runs it: everything compiles, and is listed."""
    variables = os.environ | {"TOKENLOOM_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "tokenloom", "cache", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=variables)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert run("build", *sizes).startswith(f"{number} compiled in ")
    assert f"\n{number} kernels, " in run("list")


def asked_for(num_tokens: int) -> set[KernelSpec]:
    """What a communicator of so many tokens a rank loads, of all calls whose kernels are built ahead."""
    asked: set[KernelSpec] = set()
    ids, weights = torch.arange(8).view(4, 2) % 4, torch.rand(4, 2)
    fp8 = torch.zeros(4, 128, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(4, 1)

    def load(spec: KernelSpec, _: int) -> int:
        asked.add(spec)
        return 1

    with StandIns(PLAN.num_ranks) as stand_ins, mock.patch.object(kernel, "_function", load):
        sizes = {"num_experts": PLAN.num_experts, "hidden": PLAN.hidden, "top_k": PLAN.top_k}
        comm = tl.Communicator(None, **sizes, max_tokens_per_rank=num_tokens, backend="nvlink", device="cpu")

        def call(x: Any, modes: Sequence[str], **options: Any) -> None:
            """A dispatch, its combines, and backward of both where x has a gradient."""
            grad = isinstance(x, torch.Tensor) and x.requires_grad
            routed = comm.dispatch(x, ids, weights.clone().requires_grad_(grad), **options)
            stand_ins.settle()
            dtype = x.dtype if isinstance(x, torch.Tensor) else torch.bfloat16
            for mode in modes:
                for weighted in (False, True) if options["layout"] == "expert" else (None,):
                    y = torch.zeros(routed.tokens.shape, dtype=dtype, requires_grad=grad)
                    total = comm.combine(y, routed, mode=mode, weighted=weighted)
                    stand_ins.settle()
                    if grad:
                        parts = (total, routed.tokens, routed.topk_weights)
                        loss = sum(each.float().sum() for each in parts if each is not None and each.requires_grad)
                        loss.backward(retain_graph=True)
                        stand_ins.settle()

        for layout in ("token", "expert", "rank", "slots"):
            bounded = {"capacity": None if layout == "rank" else 64}
            for exact in (False,) if layout == "slots" else (True, False):
                room = {} if exact else bounded if layout == "slots" else {"sizes": "bounded", **bounded}
                modes = ("per_rank", "per_route") if layout in ("expert", "slots") else ("per_rank",)
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    call(torch.zeros(4, 128, dtype=dtype), modes, layout=layout, **room)
                    if exact:
                        call(torch.zeros(4, 128, dtype=dtype, requires_grad=True), modes, layout=layout)
                call(fp8, (), layout=layout, **room)
                for how in ({}, {"power_of_two_scales": True}):
                    call(torch.zeros(4, 128, dtype=torch.bfloat16), (), layout=layout, to_fp8=True, **how, **room)

        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            routed = comm.dispatch(torch.zeros(4, 128, dtype=dtype), ids)
            for mode in ("per_rank", "per_route"):
                stand_ins.settle()
                comm.combine(torch.zeros(routed.tokens.shape, dtype=dtype), routed, mode=mode, topk_weights=weights)
            for strategy in ("all_to_all", "all_gather"):
                x = torch.zeros(4, 128, dtype=dtype, requires_grad=True)
                call(x, ("per_rank",), layout="expert", strategy=strategy)
        for how in ({}, {"power_of_two_scales": True}):
            x = torch.zeros(4, 128, dtype=torch.bfloat16)
            call(x, (), layout="expert", strategy="all_to_all", to_fp8=True, **how)
            for scale_layout in ("columns", "packed") if how else ("columns",):
                call(x, (), layout="slots", capacity=64, scale_layout=scale_layout, to_fp8=True, **how)
        call(fp8, (), layout="expert", strategy="all_to_all")
        for scale_layout in ("columns", "packed"):
            call(fp8, (), layout="slots", capacity=64, scale_layout=scale_layout)
    return asked


def test_what_is_built_is_what_communicators_ask_for() -> None:
    """Of few tokens and of many. A build would be useless if a first call compiled all the same."""
    built, asked = set(kernel_cache.variants(PLAN)), asked_for(16) | asked_for(4096)
    of_layers = {spec for spec in built if spec.name == "pre_reduce" and dict(spec.shape)["weights"]}
    assert asked == built - of_layers
    assert len(built) == NUM_VARIANTS


def test_every_variant_has_a_name_of_its_own() -> None:
    """The name holds everything that tells a kernel from the others."""
    names = [kernel_cache.variant_name(entry_of(spec)) for spec in kernel_cache.variants(PLAN)]
    assert len(set(names)) == len(names)
    for name in (
        "dispatch/expert/ep2/e4/k2/h128/256B",
        "dispatch/rank/ep2/e4/k2/h128/512B",
        "dispatch/token/ep2/e4/k2/h128/128B/1scales",
        "dispatch/expert/ep2/e4/k2/h128/128B/1scales/bf16>fp8",
        "dispatch/rank/ep2/e4/k2/h128/128B/1scales/bf16>fp8_power_of_two",
        "combine/expert/ep2/e4/k2/h128/bf16",
        "dispatch/expert/ep2/e4/k2/h128/256B/all_gather",
        "dispatch/expert/ep2/e4/k2/h128/256B/all_to_all",
        "combine/expert/ep2/e4/k2/h128/per_route/bf16",
        "combine/expert/ep2/e4/k2/h128/weighted/bf16",
        "combine/token/ep2/e4/k2/h128/dense/fp32",
        "pre_reduce/expert/ep2/e4/k2/h128/weighted/fp16",
        "combine/rank/ep2/e4/k2/h128/fp16",
        "combine/token/ep2/e4/k2/h128/fp32",
        "combine/token/ep2/e4/k2/h4/fp32",
    ):
        assert name in names


@needs_nvrtc
def test_list_names_every_kernel(filled: Path, say: Callable[..., Result]) -> None:
    """One line each, with the name and the key; and the total."""
    done = say(filled, "list")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.count("combine/token/ep2/e4/k1/h4/fp32 ") == 1
    assert done.stdout.count("dispatch/token/ep2/e4/k1/h4/16B ") == 1
    assert re.search(rf"^{NUM_BUILT} kernels, \d+ KiB, in {re.escape(str(filled))}$", done.stdout, re.MULTILINE)
    for file in filled.iterdir():
        assert file.name[:8] in done.stdout


@needs_nvrtc
def test_inspect_shows_what_kernels_need(filled: Path, say: Callable[..., Result]) -> None:
    """All of them; those of one name; the one of a key. Registers and the rest are those of the compiler's log."""
    everything = say(filled, "inspect")
    assert (everything.exit_code, everything.stderr) == (0, "")
    assert len(re.findall(r"^ (?:dispatch|combine|pre_reduce)/", everything.stdout, re.MULTILINE)) == NUM_BUILT
    combines = say(filled, "inspect", "combine")
    assert len(re.findall(r"^ combine/", combines.stdout, re.MULTILINE)) == BUILT["combine"]
    assert "dispatch/" not in combines.stdout
    entry = next(cache.entries(filled))
    needs = entry.resources
    done = say(filled, "inspect", entry.key[:8])
    (line,) = [line for line in done.stdout.splitlines() if entry.key[:8] in line]
    blocks = r"(-|\d+)"  # a GPU is there, or not
    numbers = (entry.threads, needs.registers, 0, 0, 0, entry.shared_bytes)
    assert re.fullmatch(rf"{entry.name}/\S+ +{' +'.join(map(str, numbers))} +{blocks} +{entry.key[:8]}", line.strip())


@needs_nvrtc
def test_inspect_of_an_unknown_name(filled: Path, say: Callable[..., Result]) -> None:
    """The message says which names there are."""
    done = say(filled, "inspect", "mixer")
    assert (done.exit_code, done.stdout) == (MISUSED, "")
    found = "name is 'mixer', expected a kernel in the cache, or the beginning of its key"
    assert done.stderr == f"tokenloom: {found}: combine, dispatch, pre_reduce; see tokenloom cache inspect --help\n"


@needs_nvrtc
def test_clear(filled: Path, say: Callable[..., Result]) -> None:
    """Nothing is left in the folder, nor to list."""
    done = say(filled, "clear")
    assert (done.exit_code, done.stdout) == (0, f"{NUM_BUILT} deleted\n")
    assert list(filled.iterdir()) == []
    assert say(filled, "list").stdout == f"0 kernels, 0 KiB, in {filled}\n"


def test_an_empty_cache(tmp_path: Path, say: Callable[..., Result]) -> None:
    """No folder yet, or a file in its place, is nothing to show and nothing wrong."""
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "none", tmp_path / "file"):
        for command in ("list", "inspect"):
            done = say(folder, command)
            assert (done.exit_code, done.stdout, done.stderr) == (0, f"0 kernels, 0 KiB, in {folder}\n", "")
        assert say(folder, "clear").stdout == "0 deleted\n"


@needs_nvrtc
def test_a_build_that_cannot_be_kept_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[..., Result]
) -> None:
    """Nobody compiles ahead of time into nowhere on purpose."""
    folder = tmp_path / "file"
    folder.write_text("not a folder")
    code = (b"code", "Used 40 registers")
    monkeypatch.setattr(cache, "compile_kernel", lambda spec: code)  # compiling is not what this is about
    done = say(folder, "build", *SMALL)
    assert done.exit_code == 1
    assert done.stderr == f"tokenloom: {NUM_SMALL} could not be written to {folder}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-ranks", "7"], "--num-experts is 256, expected a multiple of the 7 ranks"),
        (["--hidden", "3"], "--hidden is 3, expected rows of a multiple of 16 bytes, which kernels copy; pass a"),
        (["--top-k", "33"], "--top-k is 33, expected at most 32"),
        (["--top-k", "9", "--num-experts", "8"], "--top-k is 9, expected at most 8"),
    ],
)
def test_impossible_shapes_are_refused(
    arguments: list[str], said: str, tmp_path: Path, say: Callable[..., Result]
) -> None:
    """The message is that of a communicator, in the names of options, and comes before anything is compiled."""
    done = say(tmp_path, "build", *arguments)
    assert done.exit_code == MISUSED
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_build_without_nvrtc_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, say: Callable[..., Result]
) -> None:
    """One line is enough: the rest of the library works without NVRTC."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler.load_nvrtc.cache_clear()
    done = say(tmp_path, "build")
    assert done.exit_code == 1
    assert "NVRTC is missing" in done.stderr
    assert "pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'" in done.stderr


def test_what_cannot_be_deleted_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[..., Result]
) -> None:
    """Entries may belong to another user: exit code 1, and where they are."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    cache._write(tmp_path, made_entry())
    monkeypatch.setattr(Path, "unlink", refuse)
    done = say(tmp_path, "clear")
    assert (done.exit_code, done.stdout) == (1, "0 deleted\n")
    assert f"could not be deleted: 1 kernel, 2 KiB, in {tmp_path}" in done.stderr


def test_kernels_of_other_versions_are_shown_too() -> None:
    """A cache may hold what another version wrote: constants that this one does not know, or others missing."""
    names = [
        kernel_cache.variant_name(made_entry(**shape))
        for shape in (
            {},
            {"num_ranks": 8, "what": 5},
            {"layout": 9, "y_dtype": 7},
            {"y_dtype": 0, "out_dtype": 2},
            {"x_dtype": 0, "quantize": 3},
        )
    ]
    assert names == ["mixer", "mixer/ep8", "mixer/?/?", "mixer/bf16>fp32", "mixer/bf16>?"]


def shown(table: Table) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_inspect_shows_trouble() -> None:
    """Spills are what one inspects a kernel for."""
    text = shown(kernel_cache.inspect_table([made_entry(shared_bytes=4096)]))
    (line,) = [line for line in text.splitlines() if "mixer" in line]
    assert line.split()[:7] == ["mixer", "128", "40", "8", "16", "256", "4096"]


@pytest.mark.parametrize("loads", [True, False], ids=["Hopper", "another GPU"])
def test_occupancy_where_a_gpu_is(loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked, with the dynamic shared memory of the launch; "-" is a GPU that cannot load the kernel."""

    def blocks_per_sm(entry: Entry) -> int:
        if not loads:
            raise RuntimeError("CUDA driver: CUDA_ERROR_NO_BINARY_FOR_GPU")
        return {4096: 3}[entry.shared_bytes]

    monkeypatch.setattr(
        kernel_cache, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, synchronize=list))
    )
    monkeypatch.setattr(kernel_cache, "blocks_per_sm", blocks_per_sm)
    text = shown(kernel_cache.inspect_table([made_entry(shared_bytes=4096)]))
    assert ("3" if loads else "-") in text.splitlines()[-2].split()


def test_names_and_keys_select() -> None:
    """A name in full, or the beginning of a key."""
    entries = [made_entry("ab" * 16), made_entry("cd" * 16)]
    assert kernel_cache.named(entries, "mixer") == entries
    assert kernel_cache.named(entries, "cd") == entries[1:]
