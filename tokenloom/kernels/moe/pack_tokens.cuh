// This rank's tokens as they are sent, where they are too many for the blocks that send them. The kernel that sends them
// is launched early: it counts routes and hears of all ranks' meanwhile.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/roles/trace.cuh"
#include "kernels/moe/packed_token.cuh"

struct PackTokensArgs {
    const unsigned char* x;  // [T][H] of Shape::x_dtype, or E4M3
    const float* scales;     // with E4M3: [T][H / 128]; row scales: [T]
    unsigned char* packed;   // [T][Shape::packed_bytes]
    int32 num_tokens;
    int32 padding;
    uint64* trace;  // see mark_block
};

template <class Shape>
__device__ void pack_tokens(const PackTokensArgs& args) {
    using Token = PackedToken<Shape>;
    constexpr int kWarps = Shape::threads / 32, kParts = Token::kParts;
    let_next_kernel_begin();
    const int lane = threadIdx.x % 32;
    const int64 first = blockIdx.x * kWarps + threadIdx.x / 32;
    if (threadIdx.x == 0) mark_block(args.trace, kBegins);
    if constexpr (Token::kQuantizes && Token::kOneScale) {  // one warp sees all of a token
        for (int64 token = first; token < args.num_tokens; token += gridDim.x * kWarps) {
            const float largest = Token::Quantized::largest(Token::values_of(args.x, token), lane);
            for (int part = 0; part < kParts; ++part)
                Token::pack(args.x, nullptr, token, args.packed + token * Shape::packed_bytes, part, lane, largest);
        }
    } else {
        for (int64 i = first; i < static_cast<int64>(args.num_tokens) * kParts; i += gridDim.x * kWarps) {
            const int64 token = i / kParts;
            Token::pack(args.x, args.scales, token, args.packed + token * Shape::packed_bytes,
                        static_cast<int>(i % kParts), lane);
        }
    }
    if (lane == 0) mark_block(args.trace, kEnds);
}
