"""jit/: what a compilation checks and reports, and the disk cache, which may cost time but never a run."""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import NUM_GPUS
from tests.support.small_kernels import Inner, ScaleArgs, needs_nvrtc, only_file, race, scale_spec
from tokenloom.errors import BackendUnavailable, KernelCompileError
from tokenloom.jit import cache, compiler
from tokenloom.jit.compiler import KernelSpec, Resources
from tokenloom.jit.kernel import Kernel, blocks_per_sm

pytestmark = pytest.mark.usefixtures("package")
NUM_RACERS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where entries go; nobody has made it yet."""
    return tmp_path / "not" / "yet"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """What was compiled since the test began."""
    specs: list[KernelSpec] = []

    def compile_kernel(spec: KernelSpec) -> tuple[bytes, str]:
        specs.append(spec)
        return compiler.compile_kernel(spec)

    monkeypatch.setattr(cache, "compile_kernel", compile_kernel)
    return specs


# -- compiling ---------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_the_same_kernel_is_the_same_bytes() -> None:
    """What makes racing writers harmless: neither the code nor the log depends on who compiles it, or when."""
    first, second = compiler.compile_kernel(scale_spec()), compiler.compile_kernel(scale_spec())
    assert first == second
    assert first[0].startswith(b"\x7fELF")
    assert compiler.entry_symbol("scale").encode() in first[0]


@needs_nvrtc
def test_a_compile_error_shows_the_log(package: Path) -> None:
    """Which kernel, for what, and the compiler's words with file and line."""
    (package / "device" / "deep" / "seven.cuh").write_text("constexpr int kSeven = no_such_name;\n")
    with pytest.raises(KernelCompileError) as raised:
        compiler.compile_kernel(scale_spec())
    for text in ("scale does not compile for sm_90a", "seven.cuh(1)", 'identifier "no_such_name" is undefined'):
        assert text in str(raised.value)


@needs_nvrtc
def test_an_unknown_architecture_is_a_compile_error() -> None:
    with pytest.raises(KernelCompileError, match="sm_12345"):
        compiler.compile_kernel(scale_spec(arch="sm_12345"))


@needs_nvrtc
def test_a_missing_header_is_named(package: Path, folder: Path) -> None:
    """An installation that lost a file: said at once, with the path."""
    (package / "device" / "numbers.cuh").unlink()
    with pytest.raises(KernelCompileError, match=r"device/numbers\.cuh: No such file"):
        cache.get(scale_spec(), folder)


class Shorter(ctypes.Structure):
    _fields_ = ScaleArgs._fields_[:-2]


class Swapped(ctypes.Structure):
    _fields_ = [*ScaleArgs._fields_[:3], ("step", ctypes.c_int32), ("start", ctypes.c_int32)]


class SwappedInside(ctypes.Structure):
    class Inner(ctypes.Structure):
        _fields_ = [("factor", ctypes.c_int32), ("bias", ctypes.c_int32)]

    _fields_ = [*ScaleArgs._fields_[:2], ("inner", Inner), *ScaleArgs._fields_[3:]]


class Narrower(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_uint64),
        ("length", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        *ScaleArgs._fields_[2:],
    ]


class NarrowerOverPadding(ctypes.Structure):
    _fields_ = [("out", ctypes.c_uint64), ("length", ctypes.c_uint32), ("inner", Inner)]
    _fields_ += [("start", ctypes.c_int32), ("step", ctypes.c_int32), ("_end", ctypes.c_int32)]


class Renamed(ctypes.Structure):
    _fields_ = [*ScaleArgs._fields_[:-1], ("stride", ctypes.c_int32)]


@needs_nvrtc
@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        pytest.param(Shorter, "size of ScaleArgs", id="a field is missing"),
        pytest.param(Swapped, "ScaleArgs::step", id="two fields of one type change places"),
        pytest.param(SwappedInside, "ScaleArgs::inner.factor", id="the same in an inner struct"),
        pytest.param(Narrower, "ScaleArgs::length", id="half as wide, at the same offset"),
        pytest.param(NarrowerOverPadding, "ScaleArgs::inner", id="narrower, the same size in all"),
        pytest.param(Renamed, 'no member "stride"', id="another name"),
    ],
)
def test_both_sides_must_agree_on_the_arguments(mirror: Any, said: str) -> None:
    """A launch copies bytes: any difference between the structs would be read as other values, so none compiles."""
    spec = scale_spec(type("ScaleArgs", (ctypes.Structure,), {"_fields_": mirror._fields_}))
    with pytest.raises(KernelCompileError) as raised:
        compiler.compile_kernel(spec)
    assert said in str(raised.value)


@needs_nvrtc
def test_resources_are_those_of_the_log(package: Path) -> None:
    """Static shared memory, a stack frame (an array indexed at run time), and spills (1024 threads have 64 registers
    each), beside a kernel that has none of them: what the tests of all kernels rely on."""
    plain = Resources.from_log(compiler.compile_kernel(scale_spec())[1])
    assert 8 <= plain.registers <= 32
    assert (plain.stack_bytes, plain.spill_bytes, plain.static_shared_bytes) == (0, 0, 0)

    (package / "kernels" / "scale" / "scale.cuh").write_text("""
struct GreedyArgs { int* out; };
template <class Shape>
__device__ void scale(const GreedyArgs& args) {
    __shared__ int shared[100];
    int local[50], live[Shape::live];
    for (int i = 0; i < 50; ++i) local[args.out[i] % 50] = i;
    shared[threadIdx.x % 100] = local[args.out[50] % 50];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::live; ++i) live[i] = args.out[1000 * i + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::live; ++i) args.out[1000 * i + live[Shape::live - 1 - i]] = live[i] + shared[live[0]];
}
""")
    greedy_args = type("GreedyArgs", (ctypes.Structure,), {"_fields_": [("out", ctypes.c_uint64)]})
    log = compiler.compile_kernel(scale_spec(greedy_args, threads=1024, live=100))[1]
    greedy = Resources.from_log(log)
    assert greedy.registers == 64
    assert greedy.static_shared_bytes == 400
    assert greedy.stack_bytes >= 200
    stores, loads = re.findall(r"(\d+) bytes spill", log)
    assert greedy.spill_bytes == int(stores) + int(loads) > int(stores) > 0


def test_without_nvrtc_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A machine without the bindings, or whose bindings find no library: an error of ours, in one line."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler.load_nvrtc.cache_clear()
    with pytest.raises(
        BackendUnavailable, match=r"NVRTC is missing .*pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"
    ):
        cache.get(scale_spec(), folder)

    class Broken:
        @staticmethod
        def nvrtcVersion() -> None:
            raise RuntimeError("Failed to dlopen libnvrtc.so.13\nsecond line")

    class Bindings:
        nvrtc = Broken

    monkeypatch.setitem(sys.modules, "cuda.bindings", Bindings)
    with pytest.raises(BackendUnavailable) as raised:
        compiler.nvrtc_version()
    assert "(Failed to dlopen libnvrtc.so.13)" in str(raised.value)


# -- the key -----------------------------------------------------------------------------------------------------

Change = Callable[[Path, pytest.MonkeyPatch], KernelSpec]


def with_text(name: str) -> Change:
    def change(package: Path, _: pytest.MonkeyPatch) -> KernelSpec:
        with (package / name).open("a") as file:
            file.write("// one more line\n")
        return scale_spec()

    return change


def with_value(module: Any, name: str, value: Any) -> Change:
    def change(_: Path, monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
        monkeypatch.setattr(module, name, value)
        return scale_spec()

    return change


CHANGES: dict[str, Change] = {
    "its own file": with_text("kernels/scale/scale.cuh"),
    "an included file": with_text("device/numbers.cuh"),
    "a file that an included file includes": with_text("device/deep/seven.cuh"),
    "a constant": lambda *_: scale_spec(more=1),
    "the value of a constant": lambda *_: scale_spec(threads=128),
    "arguments": lambda *_: scale_spec(Swapped),
    "architecture": lambda *_: scale_spec(arch="sm_90"),
    "options": with_value(cache, "OPTIONS", (*compiler.OPTIONS, "--use_fast_math")),
    "compiler": with_value(cache, "nvrtc_version", lambda: "99.9"),
    "version of the library": with_value(cache, "__version__", "99.9"),
}


@needs_nvrtc
@pytest.mark.parametrize("name", CHANGES)
def test_the_key_changes_with(name: str, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that goes into a kernel: what the key left out would be an old kernel that runs for a new one."""
    before = cache.key_of(scale_spec())
    assert cache.key_of(CHANGES[name](package, monkeypatch)) != before


@needs_nvrtc
def test_the_key_changes_with_nothing_else(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, compiled: list[KernelSpec]
) -> None:
    """Not with headers that it does not include, nor with the place of the installation: machines share entries."""
    cache.get(scale_spec(), folder)
    with_text("device/unused.cuh")(package, monkeypatch)
    monkeypatch.setattr(compiler, "PACKAGE", package.rename(tmp_path / "elsewhere"))
    cache.get(scale_spec(), folder)
    assert len(compiled) == 1


# -- reading and writing entries ---------------------------------------------------------------------------------


@needs_nvrtc
def test_a_second_get_does_not_compile(folder: Path, compiled: list[KernelSpec]) -> None:
    """What the cache is for; and the entry says everything about the kernel again."""
    first = cache.get(scale_spec(), folder)
    second = cache.get(scale_spec(), folder)
    assert len(compiled) == 1
    assert first == second == cache.stored(scale_spec(), folder)
    assert (second.name, second.shape, second.arch, second.threads) == ("scale", {"threads": 64}, "sm_90a", 64)
    assert second.resources == Resources.from_log(second.log)
    assert second.resources.registers > 0


@needs_nvrtc
def test_a_changed_header_is_compiled(package: Path, folder: Path, compiled: list[KernelSpec]) -> None:
    """Whoever edits a header gets the new kernel, not the old one from disk."""
    before = cache.get(scale_spec(), folder)
    header = package / "device" / "deep" / "seven.cuh"
    header.write_text(header.read_text().replace("7;", "8;"))
    after = cache.get(scale_spec(), folder)
    assert len(compiled) == 2
    assert before.cubin != after.cubin
    assert {entry.key for entry in cache.entries(folder)} == {before.key, after.key}


@needs_nvrtc
@pytest.mark.parametrize("goes", [False, True], ids=["changes", "goes"])
def test_a_header_that_changes_meanwhile(
    goes: bool, package: Path, folder: Path, compiled: list[KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update, or another branch, between the key and the compiler: the code of the new text was kept under the
    name of the old one, and came back with it."""
    header = package / "device" / "deep" / "seven.cuh"
    text, compile_kernel = header.read_text(), cache.compile_kernel

    def compile_another(spec: KernelSpec) -> tuple[bytes, str]:
        header.write_text(text.replace("7;", "8;"))
        made = compile_kernel(spec)
        if goes:
            header.unlink()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(cache, "compile_kernel", compile_another)
        other = cache.get(scale_spec(), folder)
    header.write_text(text)
    assert cache.get(scale_spec(), folder).cubin != other.cubin
    assert len(compiled) == 2


def sealed(about: Any, cubin: bytes = b"code") -> bytes:
    """A file whose hash is right, whatever it says."""
    rest = json.dumps(about).encode() + b"\n" + cubin
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def header_of(whole: bytes) -> dict[str, Any]:
    return json.loads(whole.split(b"\n", 2)[1])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "first half": lambda whole: whole[: len(whole) // 2],
    "last byte missing": lambda whole: whole[:-1],
    "hash only": lambda whole: whole.split(b"\n")[0],
    "hash and header only": lambda whole: b"\n".join(whole.split(b"\n")[:2]),
    "one byte more": lambda whole: whole + b"\0",
    "zeros, as after a crash": lambda whole: bytes(len(whole)),
    "garbage": lambda whole: random.Random(0).randbytes(len(whole)),
    "garbage in lines": lambda whole: b"\xff\xfe\n{}\n" + whole,
    "a list for a header": lambda whole: sealed([1, 2]),
    "a number for a header": lambda whole: sealed(3),
    "no header": lambda whole: sealed({}),
    "a field too many": lambda whole: sealed(header_of(whole) | {"more": 1}),
    "another kernel's entry": lambda whole: sealed(header_of(whole) | {"key": "0" * 32}),
}


@needs_nvrtc
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_again_and_replaced(damage: str, folder: Path, compiled: list[KernelSpec]) -> None:
    """Crashes, full disks, other programs, other versions of this one: nothing of it may reach a GPU."""
    good = cache.get(scale_spec(), folder)
    file = only_file(folder)
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    assert list(cache.entries(folder)) == []
    assert cache.get(scale_spec(), folder) == good
    assert len(compiled) == 2
    assert only_file(folder).read_bytes() == whole
    assert cache.get(scale_spec(), folder) == good
    assert len(compiled) == 2


@needs_nvrtc
def test_any_flipped_byte_is_seen(folder: Path) -> None:
    """In the hash, in the header (which says what is shown to people) and in the code."""
    cache.get(scale_spec(), folder)
    file = only_file(folder)
    whole = file.read_bytes()
    header_end = len(b"\n".join(whole.split(b"\n")[:2])) + 1
    chosen = random.Random(0).sample(range(header_end, len(whole)), 100)
    for place in [*range(header_end), *chosen]:
        broken = bytearray(whole)
        broken[place] ^= 1
        file.write_bytes(broken)
        assert cache.stored(scale_spec(), folder) is None, f"byte {place}"


# -- folders that cannot be used ---------------------------------------------------------------------------------


def file_in_its_place(folder: Path, _: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir()
    folder.write_text("not a folder")


def file_above_it(folder: Path, _: pytest.MonkeyPatch) -> None:
    folder.parent.write_text("not a folder")


def dangling_link(folder: Path, _: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir()
    folder.symlink_to(folder.parent / "nowhere" / "at all")


def no_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who is not root: not even root's tests can do it by chmod."""

    def refuse(*arguments: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(folder))

    folder.mkdir(parents=True)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)


def no_renaming(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "replace", refuse)


def full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file can be made, its bytes cannot be written."""
    make = tempfile.mkstemp

    def mkstemp(**kwargs: Any) -> tuple[int, str]:
        handle, path = make(**kwargs)
        os.close(handle)
        return os.open("/dev/full", os.O_WRONLY), path

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)


def folder_in_the_entry_s_place(folder: Path, _: pytest.MonkeyPatch) -> None:
    """It can be neither read nor replaced."""
    (folder / f"{cache.key_of(scale_spec())}.kernel" / "inner").mkdir(parents=True)


@needs_nvrtc
@pytest.mark.parametrize(
    "spoil",
    [
        file_in_its_place,
        file_above_it,
        dangling_link,
        no_permission,
        no_renaming,
        pytest.param(
            full_disk, marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full (Linux)")
        ),
        folder_in_the_entry_s_place,
    ],
)
def test_a_folder_that_cannot_be_used_costs_time_only(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[KernelSpec],
) -> None:
    """Every get compiles, none fails, nothing half-written stays, and listing and clearing work too."""
    spoil(folder, monkeypatch)
    expected = compiler.compile_kernel(scale_spec())
    for count in (1, 2):
        entry = cache.get(scale_spec(), folder)
        assert (entry.cubin, entry.log) == expected
        assert len(compiled) == count
    assert list(cache.entries(folder)) == []
    assert cache.clear(folder) == 0
    assert list(folder.parent.rglob("*.partial")) == []


@needs_nvrtc
def test_an_unreadable_entry_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[KernelSpec]
) -> None:
    """Another user's file, or a broken disk, in a folder that one may write to."""
    good = cache.get(scale_spec(), folder)
    before = only_file(folder).stat().st_ino

    real = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".kernel":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert cache.get(scale_spec(), folder) == good
    assert len(compiled) == 2
    assert only_file(folder).stat().st_ino != before
    assert cache.stored(scale_spec(), folder) == good


@needs_nvrtc
def test_an_interrupted_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while an entry is written: it goes on to the caller, and the half-written file does not stay."""

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.get(scale_spec(), folder)
    assert list(folder.iterdir()) == []


# -- several processes -------------------------------------------------------------------------------------------


@needs_nvrtc
def test_racing_processes_agree(package: Path, folder: Path) -> None:
    """Ranks start together and want the same kernels: all get the same code, no reader sees half a file, and when all
    is done the folder holds whole entries only."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(NUM_RACERS, timeout=60), context.Queue()
    racers = [
        context.Process(target=race, args=(barrier, answers, package, folder, 50), daemon=True)
        for _ in range(NUM_RACERS)
    ]
    for racer in racers:
        racer.start()
    said = [answers.get(timeout=120) for _ in racers]
    for racer in racers:
        racer.join(timeout=60)
    assert [racer.exitcode for racer in racers] == [0] * NUM_RACERS, said
    assert set(said) == {hashlib.sha256(compiler.compile_kernel(scale_spec())[0]).hexdigest()}
    assert {path.suffix for path in folder.iterdir()} == {".kernel"}
    assert len(list(cache.entries(folder))) == len(list(folder.iterdir())) == 2


# -- listing and clearing ----------------------------------------------------------------------------------------


@needs_nvrtc
def test_entries_and_clear(folder: Path) -> None:
    """Whole entries are listed; entries whole or not, and what killed writers left, are deleted; other files stay."""
    assert list(cache.entries(folder)) == []
    assert cache.clear(folder) == 0
    made = {cache.get(scale_spec(more=value), folder).key for value in (1, 2)}
    (folder / "damaged.kernel").write_text("damaged")
    (folder / "left.partial").write_text("left by a killed writer")
    (folder / "notes.txt").write_text("somebody's own")
    assert {entry.key for entry in cache.entries(folder)} == made
    assert cache.clear(folder) == 3
    assert only_file(folder).name == "notes.txt"
    assert list(cache.entries(folder)) == []


# -- launching ---------------------------------------------------------------------------------------------------


def test_without_a_driver_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A kernel compiles anywhere; to run it needs a driver, and says so."""
    from tokenloom.jit import kernel

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    kernel.load_driver.cache_clear()
    monkeypatch.setattr(cache, "get", lambda spec: None)
    with pytest.raises(BackendUnavailable, match="no CUDA driver"):
        Kernel(scale_spec(), 0)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(NUM_GPUS == 0, reason="no NVIDIA GPU on this machine")
def test_launches_take_the_arguments_of_their_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One struct serves all launches, also while earlier ones wait on the stream; a launch costs the host below 10 µs,
    arguments included, because small batches make a step out of hundreds of them."""
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(folder))
    out = torch.zeros(3, 256, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    kernel = Kernel(scale_spec(), 0)
    for row, step in enumerate((1, 20, 300)):
        kernel.args.out, kernel.args.length = out[row].data_ptr(), 250
        kernel.args.inner.bias, kernel.args.inner.factor = -7, 2
        kernel.args.start, kernel.args.step = 5, step
        kernel.launch(4, stream)
    index = torch.arange(256, device="cuda")
    expected = torch.stack([(5 + index * step) * 2 for step in (1, 20, 300)]).where(index < 250, 0)
    assert torch.equal(out, expected.int())
    costs_us = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for step in range(50):
            kernel.args.start, kernel.args.step = 5, step
            kernel.launch(4, stream)
        costs_us.append((time.perf_counter() - began) / 50 * 1e6)
    print(f"a launch costs the host {statistics.median(costs_us):.1f} µs")
    assert statistics.median(costs_us) < 10


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS == 0, reason="no NVIDIA GPU on this machine")
def test_occupancy_follows_from_what_a_block_needs(folder: Path) -> None:
    """An sm_90 SM has 2048 threads and 228 KiB of shared memory, 1 KiB of it reserved for every block."""
    torch.cuda.synchronize()
    assert blocks_per_sm(cache.get(scale_spec(threads=1024), folder)) == 2
    for shared_kib, blocks in ((100, 2), (227, 1)):
        spec = replace(scale_spec(threads=256), shared_bytes=shared_kib * 1024)
        assert blocks_per_sm(cache.get(spec, folder)) == blocks
