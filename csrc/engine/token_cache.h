// A paged KV cache for the requests of a session, which come, fork and leave. All blocks are from one pool.
//
// A block has room for kBlockTokens tokens of all layers: (layer, keys or values, kv head, token, head_dim), with the
// scales of int8 between heads (int8_cache.h). Layers whose heads differ in number or size have memory of their own,
// with blocks of the same indices. A row reads its history through a table with the slot of each token. So
// rows share their common tokens, and continuing from another row copies only a table. Each row writes to a block of
// its own. Groups share the whole blocks at the beginning of their prompts; see PrefixTable.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/buffer_pool.h"
#include "engine/prefix_table.h"

namespace fastformer {

class PackedAdapter;

enum class CacheType { fp32, bf16, int8 };

inline int64_t blocks_of(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

class TokenCache {
 public:
  // What the layers that have a state know of a row's tokens.
  struct State {
    PooledMemory memory;
    int64_t tokens = 0;  // -1: unusable after an error
    float* data() const { return reinterpret_cast<float*>(memory.data()); }
  };
  struct Row {
    std::vector<int32_t> slots;  // the slot of each position; see `keys`
    int32_t block = -1;          // the block that the row writes to
    int32_t used = kBlockTokens;
    std::shared_ptr<State> state = nullptr;  // its own; null: the model has none
  };
  struct Group {
    std::vector<Row> rows;
    std::vector<int32_t> source;  // the slots of its source
    // Or the source's keys and values, packed for the products of all rows at once (`Forward::source_head`).
    PooledMemory packed_source;
    int64_t packed_tokens = 0;
    std::vector<int32_t> blocks;  // all blocks that it holds, for its source, prompt and rows
    bool was_reordered = false;   // some of its blocks may be dead
    int64_t num_drafts = -1;      // the tokens of each row that steps have appended, without the first of them
    std::shared_ptr<const PackedAdapter> adapter;  // of its request; null: none
  };

  // The part of a prompt that is in the cache.
  struct Known {
    int64_t cached = 0;  // leading tokens whose keys and values need not be computed
    int64_t held = 0;    // those of them that groups hold, which need no additional memory
  };
  // How a prompt is computed.
  struct Beginning {
    int64_t cached = 0;  // leading tokens that are not computed
    int32_t wave = 0;    // it runs after the prompts of lower waves, which compute the cached tokens
  };

  struct Heads {
    int64_t number, dim;
    bool operator==(const Heads&) const = default;
  };
  // layers: the heads of the keys of each layer. state_bytes: the size of a row's state, which counts as tokens do.
  TokenCache(const std::vector<Heads>& layers, CacheType type, int64_t num_blocks, int64_t state_bytes = 0);
  TokenCache(const TokenCache&) = delete;
  TokenCache& operator=(const TokenCache&) = delete;

  // The number of tokens that fit into blocks that no group holds, including cached prefixes of earlier prompts.
  int64_t free_tokens() const {
    return (std::ssize(free_) + prefixes_.num_idle()) * kBlockTokens - num_states_ * state_tokens_;
  }
  int64_t state_bytes() const { return state_bytes_; }
  // The additional tokens that the groups would need if they shared nothing.
  int64_t shared_tokens() const { return prefixes_.num_shared() * kBlockTokens; }
  // The number of tokens needed to append some to each row: counts[i] to those of group places[i], or one if `counts`
  // is empty. If that is more than there is, blocks that no row uses are released first.
  int64_t step_tokens(const std::vector<int64_t>& places, const std::vector<int64_t>& counts = {});

  // Appends a group of one row, with room for a source. Throws std::length_error if there is no memory for it.
  Group& add(int64_t source_tokens);
  // Gives each row of the group slots for `tokens` more tokens.
  void append(Group& group, int64_t tokens);
  // Takes the last slots of each row back. The row has written to the blocks of these slots, and of the one before them
  // unless the last call of append gave all of them.
  void take_back(Group& group, int64_t tokens);
  // Gives the row of a new group the slots of a prompt: those of its longest cached prefix, and new ones for the rest,
  // whose whole blocks later prompts share, including those of the same admission. The caller calls set_read when the
  // rest has been computed. If the group is released before that, none of the rest stays in the cache. Only prompts of
  // one root share blocks; see PrefixTable::kNoBlock.
  Beginning begin_prompt(Group& group, const std::vector<int32_t>& tokens, int32_t root = PrefixTable::kNoBlock);
  void set_read(const Group& group);
  Known known(const std::vector<int32_t>& tokens, int32_t root = PrefixTable::kNoBlock) const;
  void reorder(Group& group, const std::vector<int32_t>& parents);
  void release(const std::vector<int64_t>& groups);

  // Returns the keys of a layer and head: the token of slot s begins at keys + s * head_dim; for int8, see Int8Rows.
  // Its values are values_offset() bytes after its keys.
  char* keys(int64_t layer, int64_t head) const {
    return region(layer).memory.data() +
           (layers_[layer].index * 2 * region(layer).heads.number + head) * head_stride(layer);
  }
  int64_t head_stride(int64_t layer) const { return kBlockTokens * region(layer).token_bytes; }  // from head to head
  int64_t values_offset(int64_t layer) const { return region(layer).heads.number * head_stride(layer); }
  // Returns the slots of a layer for slots of rows; `converted` has room for them, if they differ.
  const int32_t* slots(int64_t layer, const int32_t* slots, int64_t count, std::vector<int32_t>& converted) const;

  const CacheType type;
  std::vector<Group> groups;

 private:
  int32_t take(Group& group);
  void give_back(int32_t block);
  int32_t slot(int32_t block, int64_t offset) const { return static_cast<int32_t>(block * block_slots_ + offset); }
  void sweep(Group& group);

  int64_t state_bytes_, state_tokens_ = 0;
  std::atomic<int64_t> num_states_{0};  // workers reorder their groups at the same time
  // The layers with heads of one number and size.
  struct Region {
    Heads heads;
    int64_t token_bytes;  // per head
    int64_t block_slots;  // from one block to the next
    PooledMemory memory;
  };
  struct Layer {
    int64_t region, index;  // index: in the region
  };
  const Region& region(int64_t layer) const { return regions_[layers_[layer].region]; }

  std::vector<Region> regions_;
  std::vector<Layer> layers_;
  int64_t block_slots_;  // of the first region, whose slots rows have
  PrefixTable prefixes_;
  std::vector<int32_t> free_;  // never allocates after the constructor
  std::vector<char> seen_;     // a flag per block, for sweep
};

}  // namespace fastformer
