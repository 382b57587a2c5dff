// Checks of conditions that a caller may violate.

#pragma once

#include <sstream>
#include <stdexcept>

namespace fastformer {

// Throws an Error with a message made of the parts, unless the condition holds.
template <typename Error = std::runtime_error, typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) [[likely]]
    return;
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace fastformer
