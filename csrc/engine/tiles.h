// Multiplies rows by a panel of packed_gemm.h with AMX.
//
// A tile holds 16 rows of 64 bytes. 16 rows times 16 columns and 16 steps take the matrix unit 16 cycles, in which two
// tiles are loaded from the first-level cache. So 16 rows keep four tiles of sums, one for each quarter of the panel,
// and 32 rows four of 2 x 2: both load at most five tiles for four products. PyTorch has the same instructions behind
// oneDNN's brgemm, which this replaces: speech runs without PyTorch, and brgemm took 1.1 times as long with 16 to 64
// rows of int8 and 1.4 times as long with 128 (Sapphire Rapids). 16 rows wait for the weight, which is prefetched; for
// more the CPU's own prefetching suffices.

#pragma once

#include <algorithm>

#include "engine/packed_gemm.h"

namespace fastformer {

constexpr int64_t kTileRows = 16;       // products always have whole tiles of rows
constexpr int64_t kTileSteps = 16;      // steps of k in a tile
constexpr int64_t kMostTiledRows = 32;  // rows of one product
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileSums = kTileRows * kTileColumns;

// Whether products of the precision may use tiles: the CPU has AMX, Linux lets the process use it, and the panels are
// those of an AVX-512 build. FASTFORMER_BRGEMM=1 computes the same without AMX, slowly, for tests.
bool can_tile(Precision precision);

// Work on `rows` rows that a product does while the matrix unit multiplies, a part of it between any two tiles.
class Meanwhile {
 public:
  using Work = void (*)(const void* what, int64_t begin, int64_t end);
  Meanwhile() = default;
  Meanwhile(Work work, const void* what, int64_t rows) : work_(work), what_(what), rows_(rows) {}

  // Prepares for so many parts.
  void divide(int64_t parts) { each_ = parts > 0 ? (rows_ + parts - 1) / parts : rows_; }
  void go_on() { go_on(each_); }
  void finish() { go_on(rows_); }

 private:
  void go_on(int64_t rows) {
    if (done_ == rows_) return;
    const int64_t end = std::min(rows_, done_ + rows);
    work_(what_, done_, end);
    done_ = end;
  }

  Work work_ = nullptr;
  const void* what_ = nullptr;
  int64_t rows_ = 0, done_ = 0, each_ = 0;
};

// The tiles of a thread while it multiplies. A tile has kTileSteps steps, or fewer, of which a product is a multiple.
class Tiles {
 public:
  explicit Tiles(Precision precision, int64_t tile_steps = kTileSteps);
  ~Tiles();
  Tiles(const Tiles&) = delete;

  // Writes the products of `rows` rows from `left` on, 16 or 32, with `steps` steps of a panel from `right` on to
  // sums[r * 64 + c]: int32 for u8 times s8, float for bf16. Each is a single sum over all steps. With tiles of
  // kTileSteps, the last one may be incomplete. The rows have to have whole tiles, and no NaN beyond the last step.
  void multiply(int64_t rows, const char* left, int64_t left_stride, const char* right, int64_t steps, void* sums,
                Meanwhile&& meanwhile = {}) const;

  // Writes int32 sums of single tiles: for each of `groups` neighbours in k, of tile_steps steps, four tiles of (16,
  // 16). These are of 16 rows with the columns of both halves, or of 32 rows with those of the first half, row by row.
  // A half of `right` has 32 columns: two tiles (tile_steps, 16 columns, 4 bytes) for each group. The second one is
  // `half_bytes` after the first.
  void multiply_apart(int64_t rows, const char* left, int64_t left_stride, const char* right, int64_t half_bytes,
                      int64_t groups, int32_t* sums, Meanwhile& meanwhile) const;

 private:
  bool is_bf16_;
  int64_t tile_steps_;
};

// The number of products that the calling thread has computed with tiles, for tests.
int64_t num_tile_products();

}  // namespace fastformer
