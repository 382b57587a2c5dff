// Which blocks of a TokenCache hold the beginnings of prompts: prompts that begin alike share them, also with prompts
// that have left.
//
// A block is known by its tokens and by the block in front of it, hence by all tokens from the first one on; tokens are
// compared, and a hash only finds them. A block has as many holders as groups use it. Without a holder it is idle: it
// stays listed until its memory is needed, and the block that has been idle longest goes first. A group holds the
// blocks in front of each block that it holds, and lets go of the last one first, so that no block is idle for longer
// than one behind it: what is listed always reaches back to the first token.

#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <unordered_map>

namespace fastformer {

constexpr int64_t kBlockTokens = 16;

class PrefixTable {
 public:
  static constexpr int32_t kNoBlock = -1;  // in front of a prompt's first one
  static constexpr int64_t kRead = -1;

  struct Entry {
    int32_t block, before;
    std::array<int32_t, kBlockTokens> tokens;
    int64_t holders = 1;
    int64_t wave;  // in which its tokens are read; kRead: they were
  };

  // The entry of these kBlockTokens tokens behind a block, or null.
  const Entry* find(int32_t before, const int32_t* tokens) const;
  // Lists a block that one group holds, and that is not listed, for tokens that are not listed.
  void insert(int32_t block, int32_t before, const int32_t* tokens, int64_t wave);
  // Another group holds this block.
  void hold(int32_t block);
  // A group lets go of a block. Returns whether it stays listed; if not, its memory is free. One that was never read
  // does not stay without a holder.
  bool release(int32_t block);
  void set_read(int32_t block);
  // Takes out the block that has been idle longest, which is there, and returns it.
  int32_t evict();

  int64_t num_idle() const { return static_cast<int64_t>(idle_.size()); }
  // How many blocks more there would be if each holder had its own.
  int64_t num_shared() const { return num_shared_; }

 private:
  using Entries = std::list<Entry>;

  void erase(Entries& from, Entries::iterator entry);

  Entries held_, idle_;  // the latter: longest first
  std::unordered_map<int32_t, Entries::iterator> by_block_;
  std::unordered_multimap<uint64_t, Entries::iterator> by_hash_;
  int64_t num_shared_ = 0;
};

}  // namespace fastformer
