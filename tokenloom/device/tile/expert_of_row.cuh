// The expert of each row of rows grouped by expert, for a thread that meets rows in ascending order.
#pragma once
#include "device/ptx/types.cuh"

struct ExpertOfRow {
    const int32* ends;  // [experts] the end of each one's rows; the last is beyond all rows
    int32 expert = 0;

    __device__ __forceinline__ int32 find(int64 row) {
        while (ends[expert] <= row) ++expert;
        return expert;
    }
};
