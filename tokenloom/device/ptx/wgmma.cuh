// Warpgroup matrix multiply-accumulate on FP8, and what orders it. Four warps call these together.
#pragma once
#include "device/ptx/bulk.cuh"

// Ordinary accesses to accumulators come before the next wgmma that uses them, and the other way round.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// What the low word of a matrix descriptor holds, of a K-major tile in shared memory with rows of 128 bytes and
// 128-byte swizzle, aligned to 1024 bytes. One step of 32 along K is +2. The high word is the same for all of them.
__device__ __forceinline__ uint32 wgmma_tile(uint32 shared_address) { return (shared_address & 0x3ffff) >> 4; }

constexpr uint32 kWgmmaTileHigh = 1024 >> 4 | 1u << 30;  // 8 rows to the next; the swizzle

// D[64, 128] (+)= A[64, 32] * B[128, 32]^T, both K-major tiles in shared memory. `accumulate` 0 overwrites D.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint32 a, uint32 b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        ".reg .b64 a, b;\n"
        "mov.b64 a, {%64, %67};\n"
        "mov.b64 b, {%65, %67};\n"
        "setp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "a, b, accumulate, 1, 1;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a), "r"(b), "r"(accumulate), "n"(kWgmmaTileHigh));
}

// D[64, kColumns] += A[64, 32] * B[kColumns, 32]^T, in the first kColumns / 2 registers of D, for multiples of 16 columns.
//
// An instruction names its registers one by one. These macros say the names of the first n registers, 8 at a time, and
// bind them.
template <int kColumns>
struct ProductOf;

#define REGISTERS_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_2 REGISTERS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_3 REGISTERS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_4 REGISTERS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_5 REGISTERS_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_6 REGISTERS_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_7 REGISTERS_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS_8 REGISTERS_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_9 REGISTERS_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGISTERS_10 REGISTERS_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_11 REGISTERS_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define REGISTERS_12 REGISTERS_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_13 REGISTERS_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define REGISTERS_14 REGISTERS_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define REGISTERS_15 REGISTERS_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define REGISTERS_16 REGISTERS_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define BOUND(i) \
    "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), \
    "+f"(d[8 * i + 5]), "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
#define BOUND_1 BOUND(0)
#define BOUND_2 BOUND_1, BOUND(1)
#define BOUND_3 BOUND_2, BOUND(2)
#define BOUND_4 BOUND_3, BOUND(3)
#define BOUND_5 BOUND_4, BOUND(4)
#define BOUND_6 BOUND_5, BOUND(5)
#define BOUND_7 BOUND_6, BOUND(6)
#define BOUND_8 BOUND_7, BOUND(7)
#define BOUND_9 BOUND_8, BOUND(8)
#define BOUND_10 BOUND_9, BOUND(9)
#define BOUND_11 BOUND_10, BOUND(10)
#define BOUND_12 BOUND_11, BOUND(11)
#define BOUND_13 BOUND_12, BOUND(12)
#define BOUND_14 BOUND_13, BOUND(13)
#define BOUND_15 BOUND_14, BOUND(14)
#define BOUND_16 BOUND_15, BOUND(15)
// x0 ... x5: how the operands that follow the registers are named. add() has A in shared memory, add_held() in registers:
// lane 4g + t of a warp has of its rows g and g + 8 the values 4t ... 4t + 3, and then those 16 further, in words
// {row g, row g + 8, row g, row g + 8}. They must not change until the product is done.
#define PRODUCT(columns, groups, x0, x1, x2, x3, x4, x5)                                                          \
    template <>                                                                                                  \
    struct ProductOf<columns> {                                                                                  \
        template <int kRegisters>                                                                                \
        static __device__ __forceinline__ void add(float (&d)[kRegisters], uint32 rows, uint32 others) {         \
            static_assert(kRegisters >= columns / 2, "room for the product");                                    \
            asm volatile("{\n.reg .b64 a, b;\n"                                                                  \
                         "mov.b64 a, {" x0 ", " x2 "};\nmov.b64 b, {" x1 ", " x2 "};\n"                          \
                         "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" REGISTERS_##groups   \
                         "}, a, b, 1, 1, 1;\n}\n"                                                                \
                         : BOUND_##groups                                                                        \
                         : "r"(rows), "r"(others), "n"(kWgmmaTileHigh));                                         \
        }                                                                                                        \
        template <int kRegisters>                                                                                \
        static __device__ __forceinline__ void add_held(float (&d)[kRegisters], const uint32 (&rows)[4],         \
                                                        uint32 others) {                                         \
            static_assert(kRegisters >= columns / 2, "room for the product");                                    \
            asm volatile("{\n.reg .b64 b;\nmov.b64 b, {" x4 ", " x5 "};\n"                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" REGISTERS_##groups   \
                         "}, {" x0 ", " x1 ", " x2 ", " x3 "}, b, 1, 1, 1;\n}\n"                                  \
                         : BOUND_##groups                                                                        \
                         : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(others),                  \
                           "n"(kWgmmaTileHigh));                                                                 \
        }                                                                                                        \
    };
PRODUCT(16, 1, "%8", "%9", "%10", "%11", "%12", "%13")
PRODUCT(32, 2, "%16", "%17", "%18", "%19", "%20", "%21")
PRODUCT(48, 3, "%24", "%25", "%26", "%27", "%28", "%29")
PRODUCT(64, 4, "%32", "%33", "%34", "%35", "%36", "%37")
PRODUCT(80, 5, "%40", "%41", "%42", "%43", "%44", "%45")
PRODUCT(96, 6, "%48", "%49", "%50", "%51", "%52", "%53")
PRODUCT(112, 7, "%56", "%57", "%58", "%59", "%60", "%61")
PRODUCT(128, 8, "%64", "%65", "%66", "%67", "%68", "%69")
PRODUCT(144, 9, "%72", "%73", "%74", "%75", "%76", "%77")
PRODUCT(160, 10, "%80", "%81", "%82", "%83", "%84", "%85")
PRODUCT(176, 11, "%88", "%89", "%90", "%91", "%92", "%93")
PRODUCT(192, 12, "%96", "%97", "%98", "%99", "%100", "%101")
PRODUCT(208, 13, "%104", "%105", "%106", "%107", "%108", "%109")
PRODUCT(224, 14, "%112", "%113", "%114", "%115", "%116", "%117")
PRODUCT(240, 15, "%120", "%121", "%122", "%123", "%124", "%125")
PRODUCT(256, 16, "%128", "%129", "%130", "%131", "%132", "%133")
#undef PRODUCT

// Four 8 x 8 matrices of 16-bit values to shared memory. Lane l has values {2 * (l % 4), + 1} of row l / 4 of each, and
// gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* row, uint32 m0, uint32 m1, uint32 m2, uint32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(m0), "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

// The same, transposed: lane l has values {2 * (l % 4), + 1} of column l / 4 of each, and gives the address of a row as
// above. Of two matrices, lanes 0 to 15 do.
__device__ __forceinline__ void store_transposed(void* row, uint32 m0, uint32 m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(m0),
                 "r"(m1)
                 : "memory");
}
__device__ __forceinline__ void store_transposed(void* row, uint32 m0, uint32 m1, uint32 m2, uint32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(m0), "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}
