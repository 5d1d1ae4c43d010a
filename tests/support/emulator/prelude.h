// What every kernel begins with. It is compiled once: to read it takes the compiler as long as a small kernel.
#include "emulator.h"
#include "gin.h"
