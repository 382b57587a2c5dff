// Conditions that a caller may break.

#pragma once

#include <sstream>
#include <stdexcept>

namespace fastformer {

// Throws an Error, of the parts of a message, unless the condition holds.
template <typename Error = std::runtime_error, typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) [[likely]]
    return;
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace fastformer
