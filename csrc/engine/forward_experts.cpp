// A mixture of experts: each token goes to the feed-forward networks that its router chooses. The tokens of an expert
// are multiplied by its weights together, so a step reads the weights of an expert once.

#include <algorithm>
#include <cmath>

#include "engine/forward.h"
#include "engine/tiles.h"

namespace fastformer {
namespace {

constexpr int64_t kFewRows = 8;  // so few that one task prepares them

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Writes the softmax of n scores over them.
void softmax(float* scores, int64_t n) {
  const float largest = *std::max_element(scores, scores + n);
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += scores[i] = std::exp(scores[i] - largest);
  for (int64_t i = 0; i < n; ++i) scores[i] /= sum;
}

}  // namespace

// Makes room for a chunk, and returns the width of the hidden rows of one token.
int64_t Forward::reserve_experts(const Pass& pass, const Mixture& mixture) {
  const ModelOptions& o = model_.options;
  const FeedForward& expert = mixture.experts[0];
  const int64_t pairs = pass.most * o.experts_per_token;
  int64_t inner = o.experts_per_token * expert.inner_columns();
  choices_.resize(pairs), tokens_.resize(pairs);
  scores_.reserve(pass.most * padded(mixture.router.n)), pair_out_.reserve(pairs * padded(o.d_model));
  routed_.resize(pass.most, o.d_model, Precision::fp32);
  pairs_.resize(pairs + kTileRows, o.d_model, o.precision);
  pair_wide_.resize(pairs + kTileRows, expert.ff2.k, o.precision);
  for (const FeedForward& shared : mixture.shared) {
    shared_wide_.resize(pass.most, shared.ff2.k, o.precision);
    inner += shared.inner_columns();
  }
  return inner;
}

// Chooses the experts of a token by the router's scores. Of equal ones, the first expert is preferred.
void Forward::choose_experts(const Mixture& mixture, int64_t row) {
  const ModelOptions& o = model_.options;
  const int64_t count = std::ssize(mixture.experts), each = o.experts_per_token;
  float* scores = scores_.data() + row * padded(mixture.router.n);
  Choice* choices = choices_.data() + row * each;
  if (o.sigmoid_router)
    for (int64_t i = 0; i < count; ++i) scores[i] = sigmoid(scores[i]);
  else softmax(scores, count);
  const float* bias = mixture.choice_bias.data();
  float sum = 0;
  for (int64_t i = 0; i < each; ++i) {
    int64_t best = -1;
    for (int64_t expert = 0; expert < count; ++expert) {
      const bool is_taken = std::any_of(choices, choices + i, [=](const Choice& c) { return c.expert == expert; });
      if (is_taken) continue;
      if (best < 0 || scores[expert] + bias[expert] > scores[best] + bias[best]) best = expert;  // any if all are NaN
    }
    choices[i] = {best, 0, scores[best]};
    sum += scores[best];
  }
  const float factor = o.norm_topk_prob ? o.expert_scale / (sum + o.norm_topk_eps) : o.expert_scale;
  for (int64_t i = 0; i < each; ++i) choices[i].weight *= factor;
}

// Gives each pair its place, and lists the products.
void Forward::sort_by_expert(const Mixture& mixture, int64_t rows) {
  const int64_t each = model_.options.experts_per_token, pairs = rows * each;
  const int64_t inner = mixture.experts[0].inner_columns(), wide = padded(model_.options.d_model);
  std::vector<int64_t> ends(mixture.experts.size());
  for (int64_t i = 0; i < pairs; ++i) ++ends[choices_[i].expert];
  for (auto& products : products_) products.clear();
  int64_t first = 0;
  for (size_t expert = 0; expert < ends.size(); ++expert) {
    const int64_t count = ends[expert];
    ends[expert] = first;
    if (count == 0) continue;
    const FeedForward& ff = mixture.experts[expert];
    products_[0].push_back({&pairs_, first, count, &ff.ff1, hidden_.data() + first * inner});
    products_[1].push_back({&pair_wide_, first, count, &ff.ff2, pair_out_.data() + first * wide});
    first += count;
  }
  for (int64_t i = 0; i < pairs; ++i) {
    choices_[i].place = ends[choices_[i].expert]++;
    tokens_[choices_[i].place] = i / each;
  }
  for (const FeedForward& shared : mixture.shared) {
    products_[0].push_back({&narrow_, 0, rows, &shared.ff1, hidden_.data() + pairs * inner});
    products_[1].push_back({&shared_wide_, 0, rows, &shared.ff2, y_.data()});
  }
}

// Adds a stage of products that are known when it runs. A task gets consecutive panels of some of them.
void Forward::add_products(const std::vector<Product>& products, double work, int threads) {
  stages_.push_back({threads,
                     [&products, threads](int64_t task) {
                       const auto work_of = [](const Product& p) {
                         return gemm_work(*p.in, p.count, *p.weight) / static_cast<double>(p.weight->num_panels);
                       };
                       double all = 0;
                       for (const Product& p : products) all += work_of(p) * static_cast<double>(p.weight->num_panels);
                       double before = 0;
                       for (const Product& p : products) {
                         const double each = work_of(p);
                         const int64_t panels = p.weight->num_panels, ld = panels * kPanelColumns;
                         // Neighbouring tasks compute the same limit between them.
                         const auto limit = [&](int64_t t) {
                           if (t == threads) return panels;
                           const double at = (all * static_cast<double>(t) / threads - before) / each;
                           return std::clamp(static_cast<int64_t>(std::ceil(at)), int64_t(0), panels);
                         };
                         const int64_t begin = limit(task), end = limit(task + 1);
                         gemm({*p.in, p.first}, p.count, *p.weight, begin, end, p.out + begin * kPanelColumns, ld);
                         before += each * static_cast<double>(panels);
                       }
                     },
                     work});
}

// Adds the stages that compute the experts of the rows of narrow_; `combine_experts` adds their outputs.
void Forward::add_experts(const Mixture& mixture, Chunk chunk, int threads) {
  const ModelOptions& o = model_.options;
  const int64_t rows = chunk.count, pairs = rows * o.experts_per_token;
  add_product(o.precision == Precision::fp32 ? narrow_ : routed_, mixture.router, scores_.data(), rows, threads);
  const auto choose = [this, &mixture](int64_t row) { choose_experts(mixture, row); };
  const auto sort = [this, &mixture, rows](int64_t) { sort_by_expert(mixture, rows); };
  const auto gather = [this](int64_t pair) { pairs_.copy(pair, narrow_, tokens_[pair]); };
  if (rows < kFewRows) {
    stages_.push_back({1, [=](int64_t task) {
                         for (int64_t row = 0; row < rows; ++row) choose(row);
                         sort(task);
                         for (int64_t pair = 0; pair < pairs; ++pair) gather(pair);
                       }});
  } else {
    add_rows(rows, threads, choose);
    stages_.push_back({1, sort});
    add_rows(pairs, threads, gather);
  }
  const FeedForward& expert = mixture.experts[0];
  // Each expert's weights are read once, and each row is multiplied by those of its experts.
  const auto work = [&](const PackedRows& in, const PackedRows& of_shared, PackedWeight FeedForward::* weight) {
    const PackedWeight& w = expert.*weight;
    const int64_t read = std::min<int64_t>(pairs, std::ssize(mixture.experts));
    double sum = std::max(static_cast<double>(read * w.bytes()), gemm_work(in, pairs, w));
    for (const FeedForward& shared : mixture.shared) sum += gemm_work(of_shared, rows, shared.*weight);
    return sum;
  };
  add_products(products_[0], work(pairs_, narrow_, &FeedForward::ff1), threads);
  const int64_t inner = expert.inner_columns();
  add_rows(pairs, threads, [=, this, activation = o.activation, d_ff = expert.ff2.k](int64_t pair) {
    activate_row(activation, hidden_.data() + pair * inner, d_ff);
    pair_wide_.store(pair, hidden_.data() + pair * inner);
  });
  for (const FeedForward& shared : mixture.shared)
    add_rows(rows, threads, [=, this, activation = o.activation, &shared](int64_t row) {
      float* hidden = hidden_.data() + pairs * inner + row * shared.inner_columns();
      activate_row(activation, hidden, shared.ff2.k);
      shared_wide_.store(row, hidden);
    });
  add_products(products_[1], work(pair_wide_, shared_wide_, &FeedForward::ff2), threads);
}

// Writes the sum of the outputs of a token's experts to its row of y_, which has the output of the shared expert.
void Forward::combine_experts(const Mixture& mixture, int64_t row) {
  const ModelOptions& o = model_.options;
  const int64_t wide = padded(o.d_model), each = o.experts_per_token;
  float* y = y_.data() + row * wide;
  const float* scores = scores_.data() + row * padded(mixture.router.n);
  const bool has_gate = o.shared_gate && !mixture.shared.empty();
  const float weight = has_gate ? sigmoid(scores[mixture.router.n - 1]) : 1;
  const Choice* choices = choices_.data() + row * each;
  for_each_vec<float>(o.d_model, [&](int64_t c, int64_t n) {
    using V = Vec<float>;
    V sum = mixture.shared.empty() ? V(0.f) : V::load(y + c, n) * V(weight);
    for (int64_t i = 0; i < each; ++i)
      sum = fmadd(V::load(pair_out_.data() + choices[i].place * wide + c, n), V(choices[i].weight), sum);
    sum.store(y + c, n);
  });
}

}  // namespace fastformer
