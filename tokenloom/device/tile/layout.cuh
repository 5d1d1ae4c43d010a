// How the rows of a dispatch lie at their destination; plan.py has the words.
#pragma once

enum Layout : int { kLayoutToken = 0, kLayoutExpert = 1, kLayoutRank = 2, kLayoutSlots = 3 };
