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
#include <vector>

namespace fastformer {

constexpr int64_t kBlockTokens = 16;

class PrefixTable {
 public:
  static constexpr int32_t kNoBlock = -1;  // in front of a prompt's first one
  static constexpr int32_t kRead = -1;
  using Hash = uint64_t (*)(int32_t before, const int32_t* tokens);

  struct Entry {
    int32_t before;
    int32_t holders;
    int32_t wave;  // in which its tokens are read; kRead: they were
    std::array<int32_t, kBlockTokens> tokens;

   private:
    friend class PrefixTable;
    bool is_listed = false;
    int32_t next = kNoBlock;                     // with the same slot of `slots_`
    int32_t older = kNoBlock, newer = kNoBlock;  // among those that are idle
  };

  explicit PrefixTable(Hash hash = &seeded_hash) : hash_(hash) {}

  // The block that holds these kBlockTokens tokens behind another one, or kNoBlock.
  int32_t find(int32_t before, const int32_t* tokens) const;
  const Entry& operator[](int32_t block) const { return entries_[block]; }
  // Lists a block that one group holds, and that is not listed, for tokens that are not listed.
  void insert(int32_t block, int32_t before, const int32_t* tokens, int32_t wave);
  // Another group holds this block, which is listed.
  void hold(int32_t block);
  // A group lets go of a block. Returns whether it stays listed; if not, its memory is free. One that was never read
  // does not stay without a holder.
  bool release(int32_t block);
  // The tokens of a block are read, if it is listed.
  void set_read(int32_t block);
  // Takes out the block that has been idle longest, which is there, and returns it.
  int32_t evict();

  int64_t num_idle() const { return num_idle_; }
  // How many blocks more there would be if each holder had its own.
  int64_t num_shared() const { return num_shared_; }

 private:
  // Seeded, so that a caller can't choose prompts whose hashes are alike, which would be slow to find.
  static uint64_t seeded_hash(int32_t before, const int32_t* tokens);

  bool is_listed(int32_t block) const {
    return block < static_cast<int64_t>(entries_.size()) && entries_[block].is_listed;
  }
  int32_t& slot_of(const Entry& entry) {
    return slots_[hash_(entry.before, entry.tokens.data()) & (slots_.size() - 1)];
  }
  void grow();
  void unlist(int32_t block);
  void leave_idle(Entry& entry);

  Hash hash_;
  std::vector<Entry> entries_;  // by block
  std::vector<int32_t> slots_;  // by hash, a power of two: the first block of each; no more are listed than these
  int32_t oldest_ = kNoBlock, newest_ = kNoBlock;
  int64_t num_listed_ = 0, num_idle_ = 0, num_shared_ = 0;
};

}  // namespace fastformer
