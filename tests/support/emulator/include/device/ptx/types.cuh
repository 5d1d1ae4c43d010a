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

struct alignas(8) StampedWord {  // a word and the call that it belongs to, which are stored and loaded together
    int32 value;
    uint32 epoch;
};
