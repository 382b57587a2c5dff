#include "engine/token_cache.h"

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>

#include "engine/int8_cache.h"

namespace fastformer {
namespace {

int64_t bytes_of(int64_t head_dim, CacheType type) {
  return type == CacheType::int8 ? Int8Rows::token_bytes(head_dim) : head_dim * (type == CacheType::bf16 ? 2 : 4);
}

}  // namespace

TokenCache::TokenCache(const std::vector<Heads>& layers, CacheType cache_type, int64_t num_blocks, int64_t state_bytes)
    : type(cache_type), state_bytes_(state_bytes) {
  int64_t block_bytes = 0;
  for (const Heads& heads : layers) {
    const auto same = std::find_if(regions_.begin(), regions_.end(), [&](const Region& r) { return r.heads == heads; });
    const auto at = same - regions_.begin();
    if (same == regions_.end()) regions_.push_back({heads, bytes_of(heads.dim, cache_type), 0, {}});
    const int64_t slots = 2 * heads.number * kBlockTokens;
    layers_.push_back({at, regions_[at].block_slots / slots});
    regions_[at].block_slots += slots;
  }
  for (Region& region : regions_) {
    if (num_blocks > std::numeric_limits<int32_t>::max() / region.block_slots)
      throw std::length_error("expected a smaller cache: slots are 32-bit numbers");
    // Untouched pages use no memory, so the whole budget can be allocated at once.
    region.memory = PooledMemory(region.block_slots * num_blocks * region.token_bytes);
    block_bytes += region.block_slots * region.token_bytes;
  }
  block_slots_ = regions_.at(0).block_slots;
  state_tokens_ = (state_bytes + block_bytes - 1) / block_bytes * kBlockTokens;
  seen_.resize(num_blocks);
  for (int64_t block = num_blocks; block-- > 0;) free_.push_back(static_cast<int32_t>(block));
}

const int32_t* TokenCache::slots(int64_t layer, const int32_t* slots, int64_t count,
                                 std::vector<int32_t>& converted) const {
  if (layers_[layer].region == 0) return slots;
  const auto before = static_cast<int32_t>(block_slots_), after = static_cast<int32_t>(region(layer).block_slots);
  converted.resize(count);
  for (int64_t i = 0; i < count; ++i)
    converted[i] = i && slots[i] == slots[i - 1] + 1 ? converted[i - 1] + 1  // of one block
                                                     : slots[i] / before * after + slots[i] % before;
  return converted.data();
}

int32_t TokenCache::take(Group& group) {
  if (free_.empty() && group.was_reordered) sweep(group);
  if (free_.empty() && prefixes_.num_idle()) free_.push_back(prefixes_.evict());
  if (free_.empty()) throw std::length_error("the cache has no room for another token");
  group.blocks.push_back(free_.back());
  free_.pop_back();
  return group.blocks.back();
}

void TokenCache::give_back(int32_t block) {
  if (!prefixes_.release(block)) free_.push_back(block);
}

int64_t TokenCache::step_tokens(const std::vector<int64_t>& places, const std::vector<int64_t>& counts) {
  int64_t blocks = 0;
  for (size_t i = 0; i < places.size(); ++i)
    for (const Row& row : groups[places[i]].rows)
      blocks += std::max<int64_t>(1, blocks_of(row.used + (counts.empty() ? 1 : counts[i]))) - 1;
  if (blocks * kBlockTokens > free_tokens())
    for (const int64_t place : places)
      if (groups[place].was_reordered) sweep(groups[place]);
  return blocks * kBlockTokens;
}

TokenCache::Group& TokenCache::add(int64_t source_tokens) {
  if (blocks_of(source_tokens) * kBlockTokens + state_tokens_ > free_tokens())
    throw std::length_error("the cache has no room for another source or state");
  std::shared_ptr<State> state;
  if (state_bytes_) {
    state = std::make_shared<State>(State{PooledMemory(state_bytes_)});
    std::fill_n(state->data(), state_bytes_ / 4, 0.f);
  }
  Group& group = groups.emplace_back();
  group.rows.resize(1);
  if (state) group.rows[0].state = std::move(state), ++num_states_;
  for (int64_t token = 0; token < source_tokens; ++token) {
    if (token % kBlockTokens == 0) take(group);
    group.source.push_back(slot(group.blocks.back(), token % kBlockTokens));
  }
  return group;
}

void TokenCache::append(Group& group, int64_t tokens) {
  for (Row& row : group.rows)
    for (int64_t i = 0; i < tokens; ++i) {
      if (row.used == kBlockTokens) {
        // Collect dead blocks when a row starts a new block, which is rare enough.
        if (group.was_reordered) sweep(group);
        row.block = take(group);
        row.used = 0;
      }
      row.slots.push_back(slot(row.block, row.used++));
    }
}

void TokenCache::take_back(Group& group, int64_t tokens) {
  for (Row& row : group.rows)
    for (int64_t i = 0; i < tokens; ++i) {
      if (row.used == 0) {  // the block is empty: go back to the one that the row filled before it
        group.blocks.erase(std::find(group.blocks.begin(), group.blocks.end(), row.block));
        give_back(row.block);
        row.block = static_cast<int32_t>(row.slots.back() / block_slots_);
        row.used = static_cast<int32_t>(row.slots.back() % block_slots_) + 1;
      }
      row.slots.pop_back(), --row.used;
    }
}

TokenCache::Beginning TokenCache::begin_prompt(Group& group, const std::vector<int32_t>& tokens, int32_t root) {
  const int64_t length = std::ssize(tokens), whole = length / kBlockTokens * kBlockTokens;
  Beginning beginning;
  int32_t before = root;
  Row& row = group.rows[0];
  row.slots.reserve(length);
  for (int64_t& at = beginning.cached; at < whole; at += kBlockTokens) {
    const int32_t block = prefixes_.find(before, tokens.data() + at);
    if (block == PrefixTable::kNoBlock) break;
    group.blocks.push_back(block);
    prefixes_.hold(block);
    for (int64_t i = 0; i < kBlockTokens; ++i) row.slots.push_back(slot(block, i));
    beginning.wave = std::max(beginning.wave, prefixes_[block].wave + 1);
    before = block;
  }
  append(group, length - beginning.cached);
  for (int64_t at = beginning.cached; at < whole; at += kBlockTokens) {
    const int32_t block = group.blocks[at / kBlockTokens];
    prefixes_.insert(block, before, tokens.data() + at, beginning.wave);
    before = block;
  }
  return beginning;
}

void TokenCache::set_read(const Group& group) {
  for (const int32_t block : group.blocks) prefixes_.set_read(block);
}

TokenCache::Known TokenCache::known(const std::vector<int32_t>& tokens, int32_t root) const {
  Known known;
  int32_t before = root;
  for (int64_t behind = kBlockTokens; behind <= std::ssize(tokens); behind += kBlockTokens) {
    before = prefixes_.find(before, tokens.data() + known.cached);
    if (before == PrefixTable::kNoBlock) break;
    known.cached = behind;
    if (prefixes_[before].holders) known.held = behind;
  }
  return known;
}

void TokenCache::reorder(Group& group, const std::vector<int32_t>& parents) {
  const size_t before = group.rows.size();
  std::vector<Row> rows(parents.size());
  if (state_bytes_) {
    for (size_t i = 0; i < parents.size(); ++i) {
      std::shared_ptr<State>& state = group.rows[parents[i]].state;
      const bool is_last = std::find(parents.begin() + i + 1, parents.end(), parents[i]) == parents.end();
      rows[i].state =
          is_last ? std::move(state) : std::make_shared<State>(State{PooledMemory(state_bytes_), state->tokens});
      if (!is_last) std::copy_n(state->data(), state_bytes_ / 4, rows[i].state->data());
    }
    num_states_ += std::ssize(rows) - std::ssize(group.rows);
  }
  for (size_t i = 0; i < parents.size(); ++i) {
    rows[i].slots = group.rows[parents[i]].slots;
    // A row inherits the block that the previous row with its index was writing to.
    if (i < before) rows[i].block = group.rows[i].block, rows[i].used = group.rows[i].used;
  }
  group.rows.swap(rows);
  group.was_reordered = true, group.num_drafts = -1;
}

void TokenCache::sweep(Group& group) {
  const auto mark = [&](int32_t slot) { seen_[slot / block_slots_] = 1; };
  for (const int32_t slot : group.source) mark(slot);
  for (const Row& row : group.rows) {
    for (const int32_t slot : row.slots) mark(slot);
    if (row.used < kBlockTokens) seen_[row.block] = 1;
  }
  size_t count = 0;
  for (const int32_t block : group.blocks) {
    if (seen_[block]) group.blocks[count++] = block;
    else give_back(block);
  }
  group.blocks.resize(count);
  for (const int32_t block : group.blocks) seen_[block] = 0;
  group.was_reordered = false;
}

void TokenCache::release(const std::vector<int64_t>& leaving) {
  std::vector<char> leaves(groups.size());  // if any index is invalid, no group is released
  for (const int64_t at : leaving) {
    if (at < 0 || at >= std::ssize(groups) || leaves[at])
      throw std::invalid_argument("expected unique indices of existing groups");
    leaves[at] = 1;
  }
  for (const int64_t at : leaving) {
    Group& group = groups[at];
    for (auto block = group.blocks.rbegin(); block != group.blocks.rend(); ++block) give_back(*block);
    if (state_bytes_) num_states_ -= std::ssize(group.rows);
    group.rows.clear();
  }
  std::erase_if(groups, [](const Group& group) { return group.rows.empty(); });
}

}  // namespace fastformer
