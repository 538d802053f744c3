#pragma once

#include <chrono>

namespace paceline {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

}  // namespace paceline
