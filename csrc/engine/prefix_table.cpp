#include "engine/prefix_table.h"

#include <algorithm>
#include <random>

namespace fastformer {

uint64_t PrefixTable::seeded_hash(int32_t before, const int32_t* tokens) {
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

int32_t PrefixTable::find(int32_t before, const int32_t* tokens) const {
  if (num_listed_ == 0) return kNoBlock;
  int32_t block = slots_[hash_(before, tokens) & (slots_.size() - 1)];
  for (; block != kNoBlock; block = entries_[block].next) {
    const Entry& entry = entries_[block];
    if (entry.before == before && std::equal(entry.tokens.begin(), entry.tokens.end(), tokens)) return block;
  }
  return kNoBlock;
}

void PrefixTable::insert(int32_t block, int32_t before, const int32_t* tokens, int32_t wave) {
  // Statements that may throw come before any change.
  if (block >= std::ssize(entries_)) entries_.resize(std::max<size_t>(block + 1, 2 * entries_.size()));
  if (num_listed_ == std::ssize(slots_)) grow();
  Entry& entry = entries_[block];
  entry.before = before, entry.holders = 1, entry.wave = wave, entry.is_listed = true;
  std::copy_n(tokens, kBlockTokens, entry.tokens.begin());
  int32_t& first = slot_of(entry);
  entry.next = first;
  first = block;
  ++num_listed_;
}

void PrefixTable::grow() {
  std::vector<int32_t> slots(std::max<size_t>(64, 2 * slots_.size()), kNoBlock);
  slots_.swap(slots);
  for (const int32_t first : slots)
    for (int32_t block = first, next; block != kNoBlock; block = next) {
      Entry& entry = entries_[block];
      int32_t& slot = slot_of(entry);
      next = entry.next;
      entry.next = slot;
      slot = block;
    }
}

void PrefixTable::unlist(int32_t block) {
  Entry& entry = entries_[block];
  int32_t* place = &slot_of(entry);
  while (*place != block) place = &entries_[*place].next;
  *place = entry.next;
  entry.is_listed = false;
  --num_listed_;
}

void PrefixTable::hold(int32_t block) {
  Entry& entry = entries_[block];
  if (entry.holders++ == 0) leave_idle(entry);
  else ++num_shared_;
}

bool PrefixTable::release(int32_t block) {
  if (!is_listed(block)) return false;
  Entry& entry = entries_[block];
  if (--entry.holders > 0) {
    --num_shared_;
    return true;
  }
  if (entry.wave != kRead) {
    unlist(block);
    return false;
  }
  entry.older = newest_, entry.newer = kNoBlock;
  (newest_ == kNoBlock ? oldest_ : entries_[newest_].newer) = block;
  newest_ = block;
  ++num_idle_;
  return true;
}

void PrefixTable::leave_idle(Entry& entry) {
  (entry.older == kNoBlock ? oldest_ : entries_[entry.older].newer) = entry.newer;
  (entry.newer == kNoBlock ? newest_ : entries_[entry.newer].older) = entry.older;
  --num_idle_;
}

void PrefixTable::set_read(int32_t block) {
  if (is_listed(block)) entries_[block].wave = kRead;
}

int32_t PrefixTable::evict() {
  const int32_t block = oldest_;
  leave_idle(entries_[block]);
  unlist(block);
  return block;
}

}  // namespace fastformer
