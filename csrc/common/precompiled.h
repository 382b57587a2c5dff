// The third-party headers that most sources include. setup.py compiles them once for each set of flags and includes the
// result first in every source with those flags. Other compilers skip this, so each source still includes what it uses.
// Don't add <iostream>, or a header of PyTorch that includes it: every source would get a static constructor. There is
// no `#pragma once`, because GCC warns of it in a header that it compiles, and this header is included only once.

#include <immintrin.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
