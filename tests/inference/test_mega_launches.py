"""MegaMoE on backend "nvlink": what its kernels are told, seen without a GPU.

What is the same in all calls is written down once; a kernel that missed a change would compute with old weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.stand_ins import StandIns
from tokenloom.backends.peers.fused import FusedLayerCalls
from tokenloom.errors import InvalidArgument
from tokenloom.inference.expert_memory import LINE, ExpertMemory
from tokenloom.inference.mega_gemms import MegaGemms
from tokenloom.inference.schedules import MegaSchedule, schedule_for
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.gemm.launch import LEAST_STEP, tile_places
from tokenloom.kernels.moe.launch import MOST_KEPT, PACK_WARPS
from tokenloom.plan import FUNCTIONS

HIDDEN, INTERMEDIATE, NUM_RANKS, LOCAL, TOP_K = 256, 256, 4, 2, 2
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

Launches = dict[str, Any]


@pytest.fixture
def made() -> Iterator[StandIns]:
    with StandIns(NUM_RANKS) as stand_ins:
        yield stand_ins


@pytest.fixture
def launches(made: StandIns, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Arguments of the latest launch of each kernel, by its name; two GEMMs by what they are."""
    seen: Launches = {}
    launch = Kernel.launch

    def record(kernel: Kernel, blocks: int, stream: int) -> None:
        shape = dict(kernel.spec.shape)
        name = kernel.spec.name
        if name == "grouped_gemm":
            name = "gemm1" if shape["swiglu"] else "gemm2"
        seen[name] = type(kernel.args).from_buffer_copy(kernel.args)
        seen[name].shape, seen[name].overlaps_previous, seen[name].blocks = shape, kernel.overlaps_previous, blocks
        launch(kernel, blocks, stream)

    monkeypatch.setattr(Kernel, "launch", record)
    return seen


def make_layer(**options: Any) -> tl.MegaMoE:
    sizes = {"num_experts": NUM_RANKS * LOCAL, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K}
    return tl.MegaMoE(None, **{**sizes, "max_tokens_per_rank": 600, "device": "cpu", **options})


def new_weights() -> tuple[torch.Tensor, ...]:
    def fp8(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8).view(FP8)

    return (
        fp8(LOCAL, 2 * INTERMEDIATE, HIDDEN),
        torch.ones(LOCAL, 2 * INTERMEDIATE // 128, HIDDEN // 128),
        fp8(LOCAL, HIDDEN, INTERMEDIATE),
        torch.ones(LOCAL, HIDDEN // 128, INTERMEDIATE // 128),
    )


def call(layer: tl.MegaMoE, num_tokens: int = 5, dtype: torch.dtype = BF16, **options: Any) -> list[torch.Tensor]:
    """x, its scales where it has some, ids, weights and the result."""
    x: list[torch.Tensor] = [torch.zeros(num_tokens, HIDDEN, dtype=BF16).to(dtype)]
    if dtype == FP8:
        x.append(torch.ones(num_tokens, HIDDEN // 128))
    ids, weights = torch.zeros(num_tokens, TOP_K, dtype=torch.int64), torch.ones(num_tokens, TOP_K)
    out = layer(x[0] if len(x) == 1 else (x[0], x[1]), ids, weights, **options)
    return [*x, ids, weights, out]


def same_call(launches: Launches) -> None:
    """The kernels of a call agree on where its results and the memory between them are."""
    sent, gemm1, gemm2, summed, barrier = (
        launches[name] for name in ("send_routes", "gemm1", "gemm2", "sum_routes", "barrier")
    )
    assert sent.num_tokens == summed.num_tokens
    if not sent.shape["kept_tokens"]:
        packed = launches["pack_tokens"]
        assert (packed.num_tokens, packed.packed) == (sent.num_tokens, sent.packed)
    assert summed.topk_ids == sent.topk_ids
    assert summed.met == barrier.opened
    assert gemm1.offsets == gemm2.offsets == sent.offsets
    assert gemm1.expected == sent.expected
    mine = summed.combine_recv - gemm2.results  # where this rank's part of what all ranks write to begins
    assert gemm1.a_scales == mine + sent.row_scales
    assert gemm1.row_weights == gemm2.row_weights == mine + sent.row_weights
    assert (gemm1.arrived, gemm2.row_homes) == (mine + sent.arrived, mine + sent.row_homes)
    assert gemm2.peers == sent.peers
    assert gemm2.a_scales == gemm1.out_scales
    deadlines = [(each.fault, each.fault_claimed, each.timeout_ns) for each in (gemm1.deadline, gemm2.deadline)]
    assert deadlines == [(sent.call.fault, sent.call.fault_claimed, sent.call.timeout_ns)] * 2
    assert barrier.cleared == gemm1.begun == gemm2.begun == sent.begun, "it is 0 at first"
    assert gemm2.quantized == sent.begun + 4 * LINE, "and what is counted there, from 0 too"
    assert gemm1.stored == gemm2.stored == sent.begun + 4 * 2 * LINE
    assert barrier.num_cleared == 2 * LINE + tile_places(NUM_RANKS * 600 * TOP_K, LOCAL)
    columns = 256 if gemm1.shape["row_scales"] else 512
    assert gemm2.stored_by == 2 * 2 * (2 * INTERMEDIATE // columns), "two warps of two blocks for each pair of strips"


def test_each_call_tells_its_own_tensors(launches: Launches) -> None:
    """Also where x has another dtype than before, or more tokens than senders keep: other kernels pack it."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    for num_tokens, dtype, gives_out in ((5, BF16, False), (9, FP8, True), (300, BF16, True), (0, FP8, False)):
        stats = torch.zeros(LOCAL, dtype=torch.int32)
        out = torch.zeros(num_tokens, HIDDEN, dtype=BF16) if gives_out else None
        x, *scales, ids, weights, result = call(layer, num_tokens, dtype, expert_stats=stats, out=out)
        same_call(launches)
        sent = launches["send_routes"]
        assert (sent.stats, sent.topk_weights) == (stats.data_ptr(), weights.data_ptr())
        packed = sent if num_tokens <= 128 else launches["pack_tokens"]
        assert (packed.x, packed.scales) == (x.data_ptr(), scales[0].data_ptr() if scales else 0)
        assert packed.shape["quantize"] == (dtype != FP8)
        assert launches["sum_routes"].topk_ids == ids.data_ptr()
        assert launches["sum_routes"].out == result.data_ptr()
        assert result is out or not gives_out
    call(layer)
    assert launches["send_routes"].stats == 0


def test_rows_that_are_quantised_in_place(launches: Launches) -> None:
    """GEMM2 quantises what GEMM1 has stored, and multiplies by the scales that it finds."""
    layer = make_layer(recipe="row")
    w1, _, w2, _ = new_weights()
    layer.use_weights(w1, torch.ones(LOCAL, 2 * INTERMEDIATE), w2, torch.ones(LOCAL, HIDDEN))
    for dtype, num_tokens in ((BF16, 5), (BF16, 300), (FP8, 5)):
        x = torch.zeros(num_tokens, HIDDEN, dtype=BF16).to(dtype)
        given = x if dtype == BF16 else (x, torch.ones(num_tokens))
        layer(given, torch.zeros(num_tokens, TOP_K, dtype=torch.int64), torch.ones(num_tokens, TOP_K))
        gemm1, gemm2 = launches["gemm1"], launches["gemm2"]
        assert gemm1.shape["row_scales"] == gemm2.shape["row_scales"] == 1
        assert launches["send_routes"].shape["row_scales"] == 1
        assert gemm2.activations == gemm1.out
        assert gemm2.a_scales == gemm2.activation_scales != 0
        assert 0 < gemm2.quantized < gemm2.stored


def test_tiles_of_as_many_rows_as_a_call_makes_likely(launches: Launches) -> None:
    """Each token of a rank brings an expert 4 * 2 / 8 rows on average. Both GEMMs take the same tiles, and all kernels
    know new weights."""
    layer = make_layer(recipe="row")
    for times in range(2):
        w1, _, w2, _ = new_weights()
        layer.use_weights(w1, torch.ones(LOCAL, 2 * INTERMEDIATE), w2, torch.full((LOCAL, HIDDEN), 2.0))
        for num_tokens, tile_rows in ((0, 128), (112, 128), (113, 160), (142, 160), (143, 256), (600, 256)):
            call(layer, num_tokens)
            gemm1, gemm2 = launches["gemm1"], launches["gemm2"]
            assert gemm1.shape["tile_rows"] == gemm2.shape["tile_rows"] == tile_rows, (times, num_tokens)
            assert gemm2.b_scales == layer.weights[3].data_ptr()
            same_call(launches)


def test_an_sm_has_two_tiles_of_few_rows(launches: Launches) -> None:
    """Of four bits, in both GEMMs, even if only one has such weights."""
    layer = make_layer(recipe="row")
    w1, _, w2, _ = new_weights()
    scales = torch.ones(LOCAL, 2 * INTERMEDIATE), torch.ones(LOCAL, HIDDEN)
    packed_w1, packed_w2 = (tl.pack_weights(w) for w in (w1, w2))
    layer.use_weights(w1, scales[0], w2, scales[1])
    call(layer, 53)
    blocks = launches["gemm1"].blocks
    for given_w1, given_w2 in ((packed_w1, packed_w2), (packed_w1, w2), (w1, w2)):
        layer.use_weights(given_w1, scales[0], given_w2, scales[1])
        four_bits = given_w1 is packed_w1, given_w2 is packed_w2
        for num_tokens, height in ((53, 64 if any(four_bits) else 128), (54, 128)):
            call(layer, num_tokens)
            for gemm, packed, w in zip(
                (launches["gemm1"], launches["gemm2"]), four_bits, (given_w1, given_w2), strict=True
            ):
                assert gemm.shape["four_bits"] == packed
                assert not packed or gemm.four_bits == w.data_ptr()
                assert gemm.shape["tile_rows"] == height
                assert gemm.blocks == (2 * blocks if packed and height == 64 else blocks), (num_tokens, packed)


def test_few_tokens_read_four_bits(launches: Launches) -> None:
    """Where weights are kept in both forms. Kernels of either form know which weights are theirs."""
    layer = make_layer(recipe="row")
    w1, _, w2, _ = new_weights()
    scales = {"w1_scales": torch.ones(LOCAL, 2 * INTERMEDIATE), "w2_scales": torch.ones(LOCAL, HIDDEN)}
    layer.load_weights(w1, w2, **scales, keep="both")
    for num_tokens in (300, 5, 130, 600):
        layer.set_activation(clamp=float(num_tokens))
        call(layer, num_tokens)
        few = num_tokens < 143
        for gemm, packed in zip((launches["gemm1"], launches["gemm2"]), layer._packed, strict=True):
            assert gemm.shape["four_bits"] == few
            assert not few or gemm.four_bits == packed.data_ptr()
        same_call(launches)
    assert "weights in FP8 and, for few tokens, four bits: " in layer.describe()
    layer.load_weights(*(torch.ones(w.shape).to(FP8) for w in (w1, w2)), **scales, keep="both")
    for w, packed in zip((layer.weights[0], layer.weights[2]), layer._packed, strict=True):
        assert w.float().any()
        assert torch.equal(packed, tl.pack_weights(w)), "both are those that were loaded last"
    layer.use_weights(*layer.weights)
    call(layer, 5)
    assert launches["gemm1"].shape["four_bits"] == 0
    assert "weights in FP8: " in layer.describe()
    for keep, tokens in (("four_bits", 600), ("both", 142)):  # no call of so few reads FP8
        layer = make_layer(recipe="row", max_tokens_per_rank=tokens)
        layer.load_weights(w1, w2, **scales, keep=keep)
        call(layer, tokens)
        assert launches["gemm2"].shape["four_bits"] == 1
        assert launches["gemm2"].four_bits == layer.weights[2].data_ptr()
        assert "weights in four bits: " in layer.describe()


def test_kernels_of_all_calls_that_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before the first call, so that graphs of any number of tokens may be captured from then on."""
    made = []
    init = Kernel.__init__

    def record(kernel: Kernel, spec: Any, device_index: int) -> None:
        made.append(dict(spec.shape).get("tile_rows"))
        init(kernel, spec, device_index)

    with StandIns(NUM_RANKS):
        monkeypatch.setattr(Kernel, "__init__", record)
        layer = make_layer(recipe="row", max_tokens_per_rank=113)
        w1, _, w2, _ = new_weights()
        layer.use_weights(w1, torch.ones(LOCAL, 2 * INTERMEDIATE), w2, torch.ones(LOCAL, HIDDEN))
        assert sorted(height for height in made if height) == [128, 128, 160, 160]


def test_each_gemm_counts_its_own_claims(launches: Launches) -> None:
    """Both may run at a time."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    for num_tokens in (5, 300):
        call(layer, num_tokens)
        assert [launches[name].shape["claims"] for name in ("gemm1", "gemm2")] == [1, 1]
        assert abs(launches["gemm1"].claimed - launches["gemm2"].claimed) >= 128


@pytest.mark.parametrize(("num_tokens", "first"), [(5, "send_routes"), (300, "pack_tokens")])
def test_kernels_begin_early_behind_one_another(launches: Launches, num_tokens: int, first: str) -> None:
    """All but the first. One block waits for other ranks: two layers on two streams could else wait for each other."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    call(layer, num_tokens)
    early = {name: launches[name].overlaps_previous for name in launches}
    names = ("pack_tokens", "send_routes", "gemm1", "gemm2", "barrier", "sum_routes")
    assert early == {name: name != first for name in names[names.index(first) :]}
    assert launches["barrier"].blocks == 1


@pytest.mark.parametrize(("num_tokens", "send_sms"), [(0, 32), (128, 32), (129, 32), (8, 2), (9, 2), (8192, 6)])
def test_blocks_that_send_few_tokens_pack_them(launches: Launches, num_tokens: int, send_sms: int) -> None:
    """Others leave that to a kernel that leaves SMs to them, by pairs: both run in clusters of two."""
    layer = make_layer(max_tokens_per_rank=8192)
    layer.use_weights(*new_weights())
    sms = layer._experts._gemms.num_sms  # type: ignore[union-attr]
    layer.schedule = MegaSchedule(send_sms=send_sms)
    call(layer, num_tokens)
    keeps = num_tokens <= MOST_KEPT * send_sms
    assert launches["send_routes"].blocks == send_sms
    assert launches["send_routes"].shape["kept_tokens"] == (MOST_KEPT if keeps else 0)
    assert ("pack_tokens" in launches) == (not keeps)
    if not keeps:
        wanted = min(-(-num_tokens * PACK_WARPS // 16), sms - send_sms)
        assert launches["pack_tokens"].blocks == wanted + wanted % 2


@pytest.mark.parametrize("gemm2_sms", [0, 16, 64])
def test_gemm1_leaves_sms_to_gemm2(launches: Launches, gemm2_sms: int) -> None:
    """GEMM2 takes all: those that are left from the beginning, the others as GEMM1 ends there."""
    layer = make_layer(schedule=MegaSchedule(gemm2_sms=gemm2_sms))
    layer.use_weights(*new_weights())
    call(layer)
    sms = layer._experts._gemms.num_sms  # type: ignore[union-attr]
    assert launches["gemm1"].blocks == sms - gemm2_sms
    assert launches["gemm2"].blocks == sms


@pytest.mark.parametrize(("sms", "kept"), [(46, 24), (2, 2)])
def test_gemm1_keeps_half_of_a_small_gpu(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, sms: int, kept: int
) -> None:
    monkeypatch.setattr("tokenloom.inference.mega_gemms.sms_for_gemms", lambda device: sms)
    layer = make_layer(schedule=MegaSchedule(gemm2_sms=64))
    layer.use_weights(*new_weights())
    call(layer)
    assert launches["gemm1"].blocks == kept


@pytest.mark.parametrize("num_tokens", [0, 128, 129, 512, 513, 8192])
def test_results_go_home_early_where_links_are_slow(num_tokens: int) -> None:
    """Which means many tokens on more than two ranks."""
    for num_ranks in (1, 2, 3, 4, 8):
        schedule = schedule_for(num_tokens, num_ranks)
        assert schedule.send_sms == (32 if num_tokens <= 128 else 16)
        assert schedule.gemm2_sms == (32 if num_tokens > 512 and num_ranks > 2 else 0)


@pytest.mark.parametrize(
    "numbers",
    [
        *({"send_sms": value} for value in (0, 3, 34, 2.0)),
        *({"gemm2_sms": value} for value in (-2, 1, 66, False)),
    ],
)
def test_schedules_have_even_numbers(numbers: dict[str, int]) -> None:
    ((name, value),) = numbers.items()
    with pytest.raises(InvalidArgument, match=f"{name} is {value}, expected an even number up to"):
        MegaSchedule(**numbers)


def test_a_capture_may_have_more_tokens_than_calls_before(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels for a dtype are loaded by its first call, as a capture can load none."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    call(layer)
    monkeypatch.setattr(FusedLayerCalls, "sender", lambda *arguments: pytest.fail("loaded"))
    monkeypatch.setattr(Kernel, "__init__", lambda *arguments: pytest.fail("loaded"))
    call(layer, 300)
    same_call(launches)


def test_a_refused_first_call_allocates_nothing(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a capture zeros are recorded and not written. So what refuses the call there comes first."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    with monkeypatch.context() as refusing:
        refusing.setattr(
            FusedLayerCalls, "make_memory", lambda *arguments: (_ for _ in ()).throw(InvalidArgument("no"))
        )
        refusing.setattr(ExpertMemory, "allocate", lambda *arguments: pytest.fail("allocated"))
        with pytest.raises(InvalidArgument):
            call(layer)
    call(layer)
    same_call(launches)


def test_graphs_keep_the_memory_between_kernels(launches: Launches) -> None:
    """Counts that another tensor overwrites would let a replay wait for ever."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    call(layer)
    backend: Any = layer.comm.engine._backend
    kept = [type(each) for each in backend._launcher.keep_with_graphs]
    assert {ExpertMemory, MegaGemms} <= set(kept)


def test_graphs_keep_the_times_that_they_write(launches: Launches) -> None:
    """Also where the layer is traced anew behind them."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    backend: Any = layer.comm.engine._backend
    first = layer.trace()
    captured = list(backend._launcher.keep_with_graphs)
    call(layer)
    assert launches["gemm1"].trace == first.gemm1.data_ptr()
    second = layer.trace()
    call(layer)
    assert any(each is first for each in captured)
    assert any(each is second for each in backend._launcher.keep_with_graphs)
    assert launches["sum_routes"].trace == second.sum.data_ptr()


def make_anew(made: StandIns, layer: tl.MegaMoE) -> None:
    backend: Any = layer.comm.engine._backend
    backend._make_memory()
    made.launchers.append(backend._launcher)


def test_memory_that_is_made_anew(launches: Launches, made: StandIns) -> None:
    """As behind a loss, or when ranks come back: no kernel knows any of the old memory, which graphs keep."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    times = layer.trace()
    backend: Any = layer.comm.engine._backend
    make_anew(made, layer)
    for _ in range(3):
        call(layer)
        call(layer, 300)
        same_call(launches)
        launcher, before = backend._launcher, dict(launches)
        assert launches["send_routes"].call.fault == launcher.outcomes.fault.record_address
        assert launches["send_routes"].call.trace == times.send.data_ptr()
        assert launches["barrier"].call.trace == times.barrier.data_ptr()
        assert launches["pack_tokens"].trace == times.pack.data_ptr()
        assert launches["sum_routes"].masked == launcher.masked_address
        kept = list(launcher.keep_with_graphs)
        make_anew(made, layer)
        call(layer)
        (memory,) = (each for each in kept if isinstance(each, ExpertMemory))
        tensors = {each.data_ptr() for each in kept if isinstance(each, torch.Tensor)}
        assert before["send_routes"].offsets == memory.offsets.data_ptr() != launches["send_routes"].offsets
        assert {before["gemm1"].claimed, before["gemm1"].a_windows, before["gemm2"].a_windows} <= tensors
        assert before["gemm1"].claimed != launches["gemm1"].claimed


def test_counts_of_calls_in_vain(launches: Launches) -> None:
    """In memory that is kept behind a loss: all that kernels add to, and wait for, is 0 as in a first call."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    call(layer)
    experts: Any = layer._experts
    calls, memory, gemms = experts._calls, experts._memory, experts._gemms
    counts = [calls.arrived, memory.expected, memory.counted, memory.block_counts, gemms.claimed]
    for each in counts:
        each.fill_(1)
    calls.begin_anew()
    assert not any(each.any() for each in counts)


def test_old_memory_is_free_for_new(launches: Launches, made: StandIns) -> None:
    """The layer lets go of its own before it makes other: both may be too large for a GPU."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    call(layer)
    experts: Any = layer._experts
    backend: Any = layer.comm.engine._backend
    backend._launcher.keep_with_graphs.clear()
    old = weakref.ref(experts._memory)
    make_anew(made, layer)
    experts.ready_stream()
    assert old() is None


@pytest.mark.parametrize("keep", ["fp8", "four_bits"])
def test_times_have_room_for_every_block(launches: Launches, keep: Any) -> None:
    """Where two share an SM too: what a block writes behind the end is somebody else's memory."""
    layer = make_layer(recipe="row")
    w1, _, w2, _ = new_weights()
    layer.load_weights(w1, w2, torch.ones(LOCAL, 2 * INTERMEDIATE), torch.ones(LOCAL, HIDDEN), keep=keep)
    times = layer.trace()
    for num_tokens in (5, 600):
        call(layer, num_tokens)
        for name, room in (("gemm1", times.gemm1), ("gemm2", times.gemm2)):
            assert launches[name].trace == room.data_ptr()
            assert launches[name].blocks <= len(room), (name, num_tokens)


def test_places_of_tiles() -> None:
    """Tiles of rows of any experts have places of their own, as device/roles/gate.cuh gives them."""
    counts = [0, 1, 128, 129, 300, 0, 127, 1]
    places, begin = [], 0
    for expert, rows in enumerate(counts):
        places += [row // LEAST_STEP + expert for row in range(begin, begin + rows, LEAST_STEP)]
        begin += rows
    assert len(set(places)) == len(places)
    assert max(places) < tile_places(begin, len(counts))


def test_weights_and_activations_change(launches: Launches) -> None:
    """In any order, and back to a kernel that was used before: GEMMs are told of the weights in use."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    call(layer)
    for clamp, changes in ((3.0, False), (None, True), (3.0, False), (5.0, True), (None, False)):
        layer.set_activation(clamp)
        if changes:
            layer.use_weights(*new_weights())
        call(layer)
        same_call(launches)
        assert launches["gemm1"].clamp == (clamp or 0.0)
        assert launches["gemm1"].b_scales == layer.weights[1].data_ptr()
        assert launches["gemm2"].b_scales == layer.weights[3].data_ptr()


def test_biases_and_other_activations_come_and_go(launches: Launches) -> None:
    """Each has a kernel of its own; both GEMMs weigh or add by the same lists."""
    layer = make_layer(activation="swigluoai")
    biases = {"w1_bias": torch.ones(LOCAL, 2 * INTERMEDIATE), "w2_bias": torch.ones(LOCAL, HIDDEN)}
    for given in (biases, {}, {"w2_bias": biases["w2_bias"]}, biases):
        layer.use_weights(*new_weights(), **given)
        call(layer)
        same_call(launches)
        first, second = launches["gemm1"], launches["gemm2"]
        assert (first.clamp, first.up_offset) == (7.0, 1.0)
        assert first.alpha == pytest.approx(1.702)
        assert first.bias == (biases["w1_bias"].data_ptr() if "w1_bias" in given else 0)
        assert second.bias == (biases["w2_bias"].data_ptr() if "w2_bias" in given else 0)
        assert second.row_weights == first.row_weights
        assert [bool(each.shape["biased"]) for each in (first, second)] == ["w1_bias" in given, "w2_bias" in given]
        assert not first.shape["plain"]
    layer.set_activation(activation="geglu")
    call(layer)
    assert launches["gemm1"].shape["function"] == FUNCTIONS.index("gelu")
    assert (launches["gemm1"].clamp, launches["gemm1"].alpha, launches["gemm1"].up_offset) == (0.0, 1.0, 0.0)


def test_no_gradients(launches: Launches) -> None:
    """Whoever calls it with gradients enabled gets the same views, which need no copies."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    with torch.enable_grad():
        *_, result = call(layer)
        assert torch.is_grad_enabled()
    assert not result.requires_grad
    same_call(launches)


def test_a_failed_call_zeros_nothing_under_the_one_before(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another stream it first waits for the call before, whose kernels still read the counts that it zeros."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    call(layer)
    done: list[str] = []
    zero, follow = torch.Tensor.zero_, FusedLayerCalls.follow

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for a copy")

    monkeypatch.setattr(FusedLayerCalls, "make_room", lambda *calls: None)
    monkeypatch.setattr(FusedLayerCalls, "follow", lambda calls: (done.append("follow"), follow(calls)))
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: (done.append("zero"), zero(tensor))[1])
    monkeypatch.setattr("tokenloom.inference.nvlink_experts.aligned", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        call(layer)
    assert done == ["follow", "zero"]


def test_a_first_call_in_inference_mode(launches: Launches) -> None:
    """Its memory is written in any mode: a call that fails outside zeros its counts, and raises its own error."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    with torch.inference_mode():
        call(layer)

    def fail(stage: str) -> None:
        layer._experts._memory.counted.fill_(1)  # type: ignore[union-attr]
        raise ValueError(stage)

    layer.after_stage = fail
    with pytest.raises(ValueError, match="dispatch"):
        call(layer)
    assert not layer._experts._memory.counted.any()  # type: ignore[union-attr]


# -- what a call may be given -----------------------------------------------------------------------------------


def freed(*shape: int) -> torch.Tensor:
    """The last rows of a tensor whose storage was freed: their address is not null."""
    tensor = torch.zeros(9, *shape[1:])[9 - shape[0] :]
    tensor.untyped_storage().resize_(0)
    return tensor


WRONG: dict[str, tuple[dict[str, Any], type[tl.TokenloomError], str]] = {
    "x: width": ({"x": torch.zeros(5, 128, dtype=BF16)}, tl.ShapeMismatch, r"x is \[5, 128\], the communicator was"),
    "x: FP8": (
        {"x": torch.zeros(5, HIDDEN).to(FP8)},
        tl.InvalidArgument,
        "x is torch.float8_e4m3fn without scales; pass ",
    ),
    "x: tokens": (
        {
            "x": torch.zeros(601, HIDDEN, dtype=BF16),
            "topk_ids": torch.zeros(601, TOP_K, dtype=torch.int64),
            "topk_weights": torch.ones(601, TOP_K),
        },
        tl.ShapeMismatch,
        "x has 601 tokens, the communicator",
    ),
    "x: freed": ({"x": freed(5, HIDDEN)}, tl.InvalidArgument, "x has no memory"),
    "scales": (
        {"x": (torch.zeros(5, HIDDEN).to(FP8), torch.ones(5, 1))},
        tl.ShapeMismatch,
        r"scales is \[5, 1\], expected \[5, 2\]",
    ),
    "ids: none": ({"topk_ids": None}, tl.InvalidArgument, "topk_ids is a NoneType, expected a torch.Tensor"),
    "ids: flat": ({"topk_ids": torch.tensor(1)}, tl.ShapeMismatch, r"topk_ids is \[\], expected \[5, 2\]"),
    "weights: none": ({"topk_weights": None}, tl.InvalidArgument, "topk_weights is None, expected float32"),
    "weights: shape": (
        {"topk_weights": torch.ones(4, TOP_K)},
        tl.ShapeMismatch,
        r"topk_weights is \[4, 2\], expected",
    ),
    "stats": ({"expert_stats": torch.zeros(LOCAL)}, tl.DtypeMismatch, "expert_stats is torch.float32, expected"),
    "out: shape": ({"out": torch.zeros(4, HIDDEN, dtype=BF16)}, tl.ShapeMismatch, r"out is \[4, 256\], expected \[5"),
    "out: address": (
        {"out": torch.zeros(5 * HIDDEN + 1, dtype=BF16)[1:].view(5, HIDDEN)},
        tl.InvalidArgument,
        "out does not begin at a multiple of 16 bytes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_named(launches: Launches, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In a first call, and in one behind right ones. Other ranks hear of it in both calls that they may open."""
    wrong, error, said = WRONG[name]
    layer = make_layer()
    layer.use_weights(*new_weights())
    backend: Any = layer.comm.engine._backend
    told: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        backend, "report_fault", lambda fault, upcoming: told.append((str(fault), [each.name for each in upcoming]))
    )
    given = {"x": torch.zeros(5, HIDDEN, dtype=BF16), "topk_ids": torch.zeros(5, TOP_K, dtype=torch.int64)}
    given["topk_weights"] = torch.ones(5, TOP_K)
    for _ in range(2):
        told.clear()
        with pytest.raises(error, match=f"^{said}") as raised:
            layer(**{**given, **wrong})
        assert told == [(str(raised.value), ["dispatch", "MegaMoE"])]
        layer(**given)


def test_right_inputs_are_looked_at_once(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is usual passes at a glance: also FP8, results in place, counts of routes, no tokens."""
    layer = make_layer()
    layer.use_weights(*new_weights())
    monkeypatch.setattr(tl.MegaMoE, "_checked", lambda *arguments: pytest.fail("looked at twice"))
    for num_tokens, dtype in ((5, BF16), (0, BF16), (9, FP8), (600, torch.float32)):
        out, stats = torch.zeros(num_tokens, HIDDEN, dtype=BF16), torch.zeros(LOCAL, dtype=torch.int32)
        call(layer, num_tokens, dtype)
        call(layer, num_tokens, dtype, expert_stats=stats, out=out)
