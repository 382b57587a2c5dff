// Checks of arguments.

#pragma once

#include <sstream>
#include <stdexcept>

namespace fastformer {

// Throws an Error whose message is the concatenation of `parts`.
template <typename Error = std::runtime_error, typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

// Does so unless the condition holds.
template <typename Error = std::runtime_error, typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) [[unlikely]]
    fail<Error>(parts...);
}

}  // namespace fastformer
