"""Rules of kernels and of their launches. What the device code does shows on GPUs only."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
EXPIRED = "tests/kernels/test_expired_calls.py"
LAUNCH = "tests/jit/test_launch.py"
TILES = "tests/kernels/test_expert_tiles.py"
TURNS = "tests/jit/test_cache_turns.py"
ONE_SCALE = "tests/backends/test_gin.py::test_one_scale_for_each_row"

LAUNCHES = (
    M("first-use-in-a-capture",
      "the first use of a kernel inside a capture is left to the driver, which ends the capture",
      "jit.kernel:_function", "torch.cuda.is_current_stream_capturing()", "False",
      f"{LAUNCH}::test_the_first_use_in_a_capture_is_refused"),
    M("launch-on-the-current-device", "a launch fails while another device is current",
      "jit.kernel:Kernel._launch_elsewhere",
      "status in (results.CUDA_ERROR_INVALID_CONTEXT, results.CUDA_ERROR_INVALID_HANDLE)", "False",
      f"{LAUNCH}::test_another_device_may_be_current"),
    M("maps-of-other-strides", "a tensor map is found again for rows that lie further apart", "jit.kernel:tensor_map",
      "tensor.stride()", "(256,)", f"{LAUNCH}::test_tensor_maps_are_found_again"),
)

COMPILED_ONCE = (
    M("every-rank-compiles", "processes that want the same kernel all compile it", "jit.cache:get",
      "_turn(folder, key)", "contextlib.nullcontext()", f"{TURNS}::test_each_kernel_is_compiled_once"),
)

EXPIRED_CALLS = (
    M("old-rows-after-an-expired-combine", "a combine in which a wait expired leaves tokens as they were",
      "kernels/combine/combine.cuh:combine", "publish_nan<Shape>(args);", "{}",
      f"{EXPIRED}::test_rows_that_never_come_home_make_everything_nan", gpu=True),
    M("summing-warps-keep-quiet", "a summing warp whose wait expired does not say so",
      "kernels/combine/sum.cuh:sum_rows", "if (!is_here) return false;", "if (!is_here) return true;",
      f"{EXPIRED}::test_rows_that_never_come_home_make_everything_nan", gpu=True),
    M("sums-before-blocks-have-sent", "an eager combine adds rows that are not there yet",
      "device/transport/call.cuh:wait_for_blocks", "return __syncthreads_and(here);", "return true;",
      "tests/kernels/test_expired_in_turns.py::test_rows_that_never_come", gpu=True),
    M("sums-behind-the-first-block", "an eager combine waits for the first block of a peer only",
      "device/transport/call.cuh:wait_for_blocks", "turn.leaves_out(peer) ||", "turn.leaves_out(peer) || block > 0 ||",
      "tests/kernels/test_expired_in_turns.py::test_rows_that_never_come", gpu=True),
    M("counts-of-an-expired-dispatch",
      "a dispatch in which a wait expired leaves the counts of rows that are not there",
      "kernels/dispatch/dispatch.cuh:dispatch", "publish_nothing<Shape>(args);", "{}",
      f"{EXPIRED}::test_rows_that_never_arrive_are_none", gpu=True),
    M("filling-warps-keep-quiet", "a filling warp whose wait expired does not say so",
      "kernels/dispatch/dispatch.cuh:send_and_fill",
      "done = done && fill_further_places<Shape>(args, shared, turn.epoch, lane);",
      "fill_further_places<Shape>(args, shared, turn.epoch, lane);",
      f"{EXPIRED}::test_rows_that_never_arrive_are_none", gpu=True),
    M("ranks-have-room-of-their-own", "ranks open a dispatch though one of them has room for fewer rows",
      "backends.peers.dispatch:DirectDispatch.__init__", "self.call_kind.also('rows of the output', self.num_places)",
      "self.call_kind", "tests/backends/test_nvlink_kinds.py::test_ranks_agree_on_rows_that_nobody_gave"),
    M("old-flags-count-again", "a flag of 2^32 calls ago counts", "device/transport/call.cuh:close_call",
      "turn.epoch % kForgets == kForgets / 2", "false",
      "tests/kernels/test_old_flags.py::test_old_flags_are_forgotten", gpu=True),
    M("flags-of-ranks-ahead-are-forgotten", "a flag of a rank that is ahead is taken for an old one",
      "device/transport/call.cuh:forget_old_flags", "static_cast<int32>(epoch - seen) > kOld", "epoch - seen > kOld",
      "tests/kernels/test_old_flags.py::test_old_flags_are_forgotten", gpu=True),
    M("flags-of-blocks-stay", "blocks find flags that blocks of calls before have raised",
      "device/transport/call.cuh:close_call", "call.block_flags[i] = 0", "(void)i",
      "tests/kernels/test_old_flags.py::test_other_calls_leave_them", gpu=True),
    M("slots-begin-at-the-first", "the slots of an expert begin where those of the first do",
      "kernels/dispatch/args.cuh:Places", "expert * args.capacity + number", "number",
      "tests/backends/test_nvlink_slots.py::test_routes", gpu=True),
    M("slots-run-over", "routes beyond the slots of an expert take those of the next",
      "kernels/dispatch/args.cuh:Places", "number < args.capacity", "number < 2 * args.capacity",
      "tests/backends/test_nvlink_slots.py::test_routes", gpu=True),
    M("scales-that-stay-are-left", "scales of rows that were quantised here, and stay, lie beside rows alone",
      "kernels/dispatch/send.cuh:send_rows", "way.lay_own_scales(lane);", "",
      "tests/backends/test_nvlink_slots.py::test_fp8", gpu=True),
    M("sparse-slots-are-received", "receive buffers have room for slots that are mostly empty",
      "backends.peers.buffers:Buffers.is_staged", "SLOTS_ROOM * _even_rows(self._plan)", "float('inf')",
      "tests/backends/test_nvlink_prepared.py::test_sparse_slots_are_filled_on_arrival"),
    M("rows-that-stay-are-left", "no block puts this rank's own rows in their places",
      "kernels/dispatch/dispatch.cuh:send_and_fill", "if (!kOnce && warp < Shape::send_warps)", "if (false)",
      "tests/backends/test_sending_blocks.py::test_rows_go_there_and_back", gpu=True),
    M("rows-that-stay-are-sent-alone", "rows for other ranks, too, are left to the blocks that place rows",
      "kernels/dispatch/send.cuh:only", "(routes.rank == own_rank) == (kSent == Sent::kOwn)",
      "routes.rank == own_rank", "tests/backends/test_sending_blocks.py::test_rows_go_there_and_back",
      gpu=True),
    M("all-blocks-send", "no block adds rows while others send", "kernels.common.sharing:Work.sending_blocks",
      "max(self.links, (self.sending + self.other) / blocks)", "self.links",
      "tests/kernels/test_sharing.py::test_nobody_is_late"),
    M("links-wait-for-senders", "so few blocks send that the links wait", "kernels.common.sharing:Work.sending_blocks",
      "math.ceil", "math.floor", "tests/kernels/test_sharing.py::test_nobody_is_late"),
    M("added-before-it-is-here", "a token's rows are loaded ahead though their chunks may not be home yet",
      "kernels/combine/sum.cuh:sum_rows", "|| !(is_here || sums.is_here())", "",
      "tests/backends/test_nvlink_chunks.py::test_sums_keep_up_with_what_comes", gpu=True),
    M("routes-of-the-row-before", "a token goes where the one before it went", "kernels/dispatch/send.cuh:ToRanks",
      "loads.begin(args, places, token, lane)", "loads.begin(args, places, max(token - 1, 0), lane)",
      "tests/comm/test_dispatch.py::test_to_fp8_and_gradients", gpu=True),
    M("sms-for-senders-alone", "blocks are counted for senders alone", "kernels.common.sharing:Work.best_blocks",
      "math.ceil(self.sending / self.links) + math.ceil(self.other / self.links)",
      "math.ceil(self.sending / self.links)", "tests/kernels/test_sharing.py::test_links_are_the_limit"),
    M("one-deadline", "opening a call has the deadline of its phases", "device/transport/call.cuh:opening_deadline_of",
      "call.open_timeout_ns", "call.timeout_ns",
      f"{EXPIRED}::test_a_rank_that_does_not_open_has_a_deadline_of_its_own", gpu=True),
    M("half-of-the-hash", "ranks compare half of the hash of their options", "device/transport/call.cuh:await_call",
      "word < kHeaderWords", "word < kHeaderWords - 1", f"{EXPIRED}::test_a_call_that_is_refused", gpu=True),
    M("barrier-always-opened", "a barrier says that it opened when a rank did not come",
      "kernels/barrier/barrier.cuh:barrier", "*args.opened = opened == Opened::kGo", "*args.opened = 1",
      f"{EXPIRED}::test_a_barrier_says_whether_it_opened", gpu=True),
)

QUANTISED_ROWS = (
    M("largest-of-a-part", "a row is quantised by the largest value of some of its lanes",
      "device/tile/fp8.cuh:largest_of", "other < 32", "other < 16", ONE_SCALE),
    M("largest-of-the-last-tile", "a row is quantised by the largest value of its last tile",
      "device/tile/fp8.cuh:largest", "amax = fmaxf(amax, largest_of_tile(from, tile, lane))",
      "amax = largest_of_tile(from, tile, lane)", ONE_SCALE),
)

FOUR_BITS = "tests/kernels/test_four_bits.py::test_the_same_bits_as_fp8"

GEMM_TILES = (
    M("signs-of-later-values", "values 4 to 7 of a word have the signs of 0 to 3",
      "device/roles/four_bits.cuh:decode_four_bits", "word << 4 & 0x80808080u", "word & 0x80808080u", FOUR_BITS),
    M("scales-of-the-first-step", "all steps of a block have the scales of the first",
      "device/roles/four_bits.cuh:decode_four_bits", "0x4440 + step", "0x4440", FOUR_BITS),
    M("words-of-one-half", "both halves of a block have the words of the first",
      "device/roles/four_bits.cuh:FourBitRows", "codes[step / 2]", "codes[0]", FOUR_BITS),
    M("counts-beyond-the-places", "a count above an expert's places runs into those of the next one",
      "device/roles/expert_tiles.cuh:BoundsInSlots::fill", "min(from[i], places)", "min(from[i], places + 1)",
      f"{TILES}::test_a_count_above_the_places_stands_for_all_of_them"),
    M("tiles-are-always-whole", "the last tile of an expert has rows of the next one",
      "device/roles/expert_tiles.cuh:FixedCut", "min(rows - tile * kRows, kRows)", "kRows",
      f"{TILES}::test_tiles_cover_each_row_once"),
    M("empty-experts-have-a-tile", "weights of experts without rows are loaded",
      "device/roles/expert_tiles.cuh:FixedCut", "(rows + kRows - 1) / kRows", "(rows + kRows) / kRows",
      f"{TILES}::test_tiles_cover_each_row_once"),
    M("rows-of-two-tiles-that-share", "the second of two tiles that share begins a full tile behind the first",
      "device/roles/expert_tiles.cuh:EvenCut", "Part{first - kRows + half, both - half}", "Part{first, both - half}",
      f"{TILES}::test_tiles_cover_each_row_once"),
    M("tiles-that-do-not-share", "weights are loaded for a tile of few rows behind a full one",
      "device/roles/expert_tiles.cuh:EvenCut", "last > 0 && rest <= kRows / 2", "false",
      f"{TILES}::test_tiles_cover_each_row_once"),
    M("tiles-of-the-average", "tiles are so low that experts with more rows than the average have two",
      "kernels.gemm.launch:average_rows", "1.5", "0.0",
      f"{TILES}::test_tiles_of_a_number_of_rows"),
    M("traces-of-fewer-tiles", "kernels write traces of more tiles than Python makes room for",
      "kernels.gemm.launch:TRACED_TILES", "128", "64",
      "tests/kernels/test_roles.py::test_numbers_are_the_same_on_both_sides"),
)

MUTATIONS = LAUNCHES + COMPILED_ONCE + EXPIRED_CALLS + QUANTISED_ROWS + GEMM_TILES
