#include "engine/prefix_table.h"

#include <algorithm>
#include <random>

namespace fastformer {
namespace {

// Seeded, so that a caller can't choose prompts whose hashes are alike, which would be slow to find.
uint64_t hash_of(int32_t before, const int32_t* tokens) {
  static const uint64_t seed = std::random_device()() | uint64_t{std::random_device()()} << 32;
  uint64_t hash = seed;
  const auto mix = [&](uint64_t value) {
    const auto product = static_cast<unsigned __int128>(hash ^ value) * 0x9e3779b97f4a7c15u;
    hash = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  mix(static_cast<uint32_t>(before));
  for (int64_t i = 0; i < kBlockTokens; i += 2)
    mix(static_cast<uint32_t>(tokens[i]) | uint64_t{static_cast<uint32_t>(tokens[i + 1])} << 32);
  return hash;
}

}  // namespace

const PrefixTable::Entry* PrefixTable::find(int32_t before, const int32_t* tokens) const {
  if (by_hash_.empty()) return nullptr;
  const auto [begin, end] = by_hash_.equal_range(hash_of(before, tokens));
  for (auto found = begin; found != end; ++found) {
    const Entry& entry = *found->second;
    if (entry.before == before && std::equal(entry.tokens.begin(), entry.tokens.end(), tokens)) return &entry;
  }
  return nullptr;
}

void PrefixTable::insert(int32_t block, int32_t before, const int32_t* tokens, int64_t wave) {
  Entry entry{.block = block, .before = before, .wave = wave};
  std::copy_n(tokens, kBlockTokens, entry.tokens.begin());
  held_.push_front(entry);
  try {
    by_block_.emplace(block, held_.begin());
    by_hash_.emplace(hash_of(before, tokens), held_.begin());
  } catch (...) {
    by_block_.erase(block);
    held_.pop_front();
    throw;
  }
}

void PrefixTable::hold(int32_t block) {
  const Entries::iterator entry = by_block_.at(block);
  if (entry->holders++ == 0) held_.splice(held_.begin(), idle_, entry);
  else ++num_shared_;
}

bool PrefixTable::release(int32_t block) {
  const auto found = by_block_.find(block);
  if (found == by_block_.end()) return false;
  const Entries::iterator entry = found->second;
  if (--entry->holders > 0) {
    --num_shared_;
    return true;
  }
  if (entry->wave != kRead) {
    erase(held_, entry);
    return false;
  }
  idle_.splice(idle_.end(), held_, entry);
  return true;
}

void PrefixTable::set_read(int32_t block) {
  const auto found = by_block_.find(block);
  if (found != by_block_.end()) found->second->wave = kRead;
}

int32_t PrefixTable::evict() {
  const int32_t block = idle_.front().block;
  erase(idle_, idle_.begin());
  return block;
}

void PrefixTable::erase(Entries& from, Entries::iterator entry) {
  const auto [begin, end] = by_hash_.equal_range(hash_of(entry->before, entry->tokens.data()));
  by_hash_.erase(std::find_if(begin, end, [=](const auto& one) { return one.second == entry; }));
  by_block_.erase(entry->block);
  from.erase(entry);
}

}  // namespace fastformer
