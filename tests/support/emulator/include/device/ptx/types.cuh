#pragma once
#include "emulator.h"
using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;
using uint16 = unsigned short;
using uint8 = unsigned char;

struct alignas(16) Vec16 {
    uint32 word[4];
};
