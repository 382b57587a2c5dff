// A PrefixTable beside the plainest one, with a hash by which nothing can be told, and with one that is often the same:
// blocks come, are shared, leave, and go. Exits with 1 where the two differ.

#include "engine/prefix_table.h"

#include <cstdio>
#include <list>
#include <map>
#include <random>
#include <vector>

using namespace fastformer;

namespace {

using Tokens = std::vector<int32_t>;

struct Plain {
  Tokens all;  // from the prompt's first one on
  int holders;
  bool is_read;
};

int differences(PrefixTable::Hash hash, uint32_t seed) {
  std::mt19937 dice(seed);
  const auto draw = [&](int below) { return static_cast<int>(dice() % below); };
  PrefixTable table(hash);
  std::map<int32_t, Plain> plain;
  std::list<int32_t> idle;
  std::vector<std::vector<int32_t>> chains;  // that are held
  std::vector<int32_t> free;
  for (int32_t block = 0; block < 40; ++block) free.push_back(block);
  int wrong = 0;
  const auto find = [&](const Tokens& all) {
    for (const auto& [block, one] : plain)
      if (one.all == all) return block;
    return PrefixTable::kNoBlock;
  };
  for (int turn = 0; turn < 3000; ++turn) {
    if (draw(2) && chains.size() < 6) {
      Tokens tokens(kBlockTokens * (1 + draw(5)));
      for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = i % kBlockTokens == 7 ? draw(2) : 3;
      std::vector<int32_t> chain;
      int32_t before = PrefixTable::kNoBlock;
      const bool is_read = draw(4);
      for (size_t at = 0; at < tokens.size(); at += kBlockTokens) {
        const Tokens all(tokens.begin(), tokens.begin() + static_cast<int64_t>(at) + kBlockTokens);
        int32_t block = table.find(before, tokens.data() + at);
        wrong += block != find(all);
        if (block != PrefixTable::kNoBlock) {
          table.hold(block);
          if (plain[block].holders++ == 0) idle.remove(block);
        } else {
          if (free.empty()) {
            wrong += table.num_idle() != static_cast<int64_t>(idle.size());
            if (idle.empty()) break;
            block = table.evict();
            wrong += block != idle.front();
            plain.erase(idle.front());
            idle.pop_front();
          } else {
            block = free.back();
            free.pop_back();
          }
          table.insert(block, before, tokens.data() + at, 0);
          plain[block] = {all, 1, false};
        }
        chain.push_back(block);
        before = block;
      }
      if (is_read)
        for (const int32_t block : chain) table.set_read(block), plain[block].is_read = true;
      chains.push_back(chain);
    } else if (!chains.empty()) {
      const int which = draw(static_cast<int>(chains.size()));
      const std::vector<int32_t> chain = chains[which];
      chains.erase(chains.begin() + which);
      for (auto block = chain.rbegin(); block != chain.rend(); ++block) {
        Plain& one = plain[*block];
        --one.holders;
        const bool stays = one.holders > 0 || one.is_read;
        wrong += table.release(*block) != stays;
        if (one.holders > 0) continue;
        if (stays) idle.push_back(*block);
        else plain.erase(*block), free.push_back(*block);
      }
    }
    int64_t shared = 0;
    for (const auto& [block, one] : plain) shared += one.holders > 1 ? one.holders - 1 : 0;
    wrong += shared != table.num_shared() || table.num_idle() != static_cast<int64_t>(idle.size());
  }
  wrong += table.release(1000);  // one that was never listed
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0;
  for (uint32_t seed = 0; seed < 10; ++seed) {
    wrong += differences([](int32_t, const int32_t*) { return uint64_t{7}; }, seed);
    wrong += differences([](int32_t before, const int32_t*) { return static_cast<uint64_t>(before) * 65; }, seed);
    wrong += differences([](int32_t, const int32_t* tokens) { return static_cast<uint64_t>(tokens[7]); }, seed);
  }
  std::printf("%d differences\n", wrong);
  return wrong != 0;
}
