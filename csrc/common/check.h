// Checks of arguments.

#pragma once

#include <sstream>
#include <stdexcept>

namespace fastformer {

// Throws an Error whose message is the concatenation of `parts` unless the condition holds.
template <typename Error = std::runtime_error, typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) [[likely]]
    return;
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace fastformer
