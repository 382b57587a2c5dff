// Records which blocks of a TokenCache contain prefixes of prompts. Prompts with a common prefix share its blocks, even
// after earlier prompts have left.
//
// A block is identified by its tokens and by the block before it, hence by all tokens from the first one on. A lookup
// finds candidates by hash and compares their tokens. The holders of a block are the groups that use it. A block
// without holders is idle: it stays listed until its memory is needed, and the block that has been idle longest is
// evicted first. A group that holds a block also holds all blocks before it, and releases the last one first. So no
// block is idle for longer than a block after it, and listed blocks always reach back to the first token.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace fastformer {

constexpr int64_t kBlockTokens = 16;

class PrefixTable {
 public:
  // The block before a prompt's first one. Prompts that are computed differently have other numbers below it.
  static constexpr int32_t kNoBlock = -1;
  static constexpr int32_t kRead = -1;
  using Hash = uint64_t (*)(int32_t before, const int32_t* tokens);

  struct Entry {
    int32_t before;
    int32_t holders;
    int32_t wave;  // the wave in which its tokens are computed; kRead: they are in the cache
    std::array<int32_t, kBlockTokens> tokens;

   private:
    friend class PrefixTable;
    bool is_listed = false;
    int32_t next = kNoBlock;                     // the next entry in the same slot of `slots_`
    int32_t older = kNoBlock, newer = kNoBlock;  // its neighbours in the list of idle blocks
  };

  explicit PrefixTable(Hash hash = &seeded_hash) : hash_(hash) {}

  // Returns the block with these kBlockTokens tokens after the block `before`, or kNoBlock.
  int32_t find(int32_t before, const int32_t* tokens) const;
  const Entry& operator[](int32_t block) const { return entries_[block]; }
  // Lists a block that is not listed, for tokens that are not listed. One group holds it.
  void insert(int32_t block, int32_t before, const int32_t* tokens, int32_t wave);
  // Records that one more group holds this listed block.
  void hold(int32_t block);
  // Records that a group releases a block. Returns whether the block stays listed; if not, its memory is free. Without
  // holders, a block whose tokens were never computed is not listed any longer.
  bool release(int32_t block);
  // Records that the tokens of a block have been computed, if it is listed.
  void set_read(int32_t block);
  // Removes the block that has been idle longest, which must exist, and returns it.
  int32_t evict();

  int64_t num_idle() const { return num_idle_; }
  // The number of additional blocks that would be needed if each holder had its own.
  int64_t num_shared() const { return num_shared_; }

 private:
  // Seeded, so that a client can't choose prompts with colliding hashes, which would make lookups slow.
  static uint64_t seeded_hash(int32_t before, const int32_t* tokens);

  bool is_listed(int32_t block) const { return block < std::ssize(entries_) && entries_[block].is_listed; }
  int32_t& slot_of(const Entry& entry) {
    return slots_[hash_(entry.before, entry.tokens.data()) & (slots_.size() - 1)];
  }
  void grow();
  void unlist(int32_t block);
  void leave_idle(Entry& entry);

  Hash hash_;
  std::vector<Entry> entries_;  // by block
  std::vector<int32_t> slots_;  // the first block of each hash; a power of two, at least the number of listed blocks
  int32_t oldest_ = kNoBlock, newest_ = kNoBlock;
  int64_t num_listed_ = 0, num_idle_ = 0, num_shared_ = 0;
};

}  // namespace fastformer
