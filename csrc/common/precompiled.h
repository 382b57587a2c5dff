// The headers of others that most sources include: setup.py compiles them once for each set of flags, and then includes
// them first in every source with those flags. Sources don't rely on it, since other compilers leave it out: each
// includes what it uses. No <iostream>, also of PyTorch's headers, which would give each source a constructor. GCC
// warns of a `#pragma once` in a header that it compiles, and this one is included once.

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
