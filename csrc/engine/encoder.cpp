#include "engine/encoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

#include "common/thread_team.h"
#include "engine/forward.h"

namespace fastformer {
namespace {

constexpr int64_t kMostTokens = 256;  // tokens per pass through a stack: their activations stay in the cache
// Below this many tokens per thread, it doesn't pay that every thread reads all weights.
constexpr int64_t kLeastTokens = 64;
constexpr int64_t kTurns = 4;  // batches per thread, at least, so that all threads finish at about the same time
// Below this product of bytes of weights and number of tokens, a second thread costs more than it saves.
constexpr int64_t kWork = 4 << 20;

void pool(Pooling pooling, const float* states, int64_t length, int64_t dim, float* to) {
  if (pooling == Pooling::cls) std::copy_n(states, dim, to);
  else if (pooling == Pooling::last) std::copy_n(states + (length - 1) * dim, dim, to);
  else if (pooling == Pooling::max) {
    std::copy_n(states, dim, to);
    for (const float* row = states + dim; row < states + length * dim; row += dim)
      for (int64_t c = 0; c < dim; ++c) to[c] = row[c] > to[c] || row[c] != row[c] ? row[c] : to[c];  // NaN stays NaN
  } else {
    static thread_local std::vector<double> sums;
    sums.assign(dim, 0.);
    const bool is_weighted = pooling == Pooling::weighted_mean;
    for (int64_t t = 0; t < length; ++t) {
      const double weight = is_weighted ? static_cast<double>(t + 1) : 1.;
      for (int64_t c = 0; c < dim; ++c) sums[c] += weight * states[t * dim + c];
    }
    const auto count = static_cast<double>(length);
    const double whole = is_weighted                         ? count * (count + 1) / 2
                         : pooling == Pooling::mean_sqrt_len ? std::sqrt(count)
                                                             : count;
    for (int64_t c = 0; c < dim; ++c) to[c] = static_cast<float>(sums[c] / whole);
  }
}

void divide_by_length(float* row, int64_t dim) {
  double square = 0;
  for (int64_t c = 0; c < dim; ++c) square += static_cast<double>(row[c]) * row[c];
  const auto length = static_cast<float>(std::max(std::sqrt(square), 1e-12));
  for (int64_t c = 0; c < dim; ++c) row[c] /= length;
}

}  // namespace

Pooling pooling_named(std::string_view name) {
  if (name == "none") return Pooling::none;
  if (name == "cls") return Pooling::cls;
  if (name == "lasttoken") return Pooling::last;
  if (name == "mean") return Pooling::mean;
  if (name == "max") return Pooling::max;
  if (name == "mean_sqrt_len_tokens") return Pooling::mean_sqrt_len;
  if (name == "weightedmean") return Pooling::weighted_mean;
  throw std::invalid_argument(
      "pooling: expected 'none', 'cls', 'lasttoken', 'mean', 'max', 'mean_sqrt_len_tokens' or 'weightedmean', got '" +
      std::string(name) + "'");
}

struct Encoder::Lane {
  explicit Lane(const PackedModel& model) : forward(model) {}
  Forward forward;
  FloatBuffer states, embeddings;
  Batch batch;
};

Encoder::Encoder(std::shared_ptr<const PackedModel> model) : model_(std::move(model)) {
  if (!model_->options.has_encoder()) throw std::invalid_argument("expected a model with an encoder");
}

Encoder::~Encoder() = default;

std::unique_ptr<Encoder::Lane> Encoder::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!lanes_.empty()) {
      std::unique_ptr<Lane> lane = std::move(lanes_.back());
      lanes_.pop_back();
      return lane;
    }
  }
  return std::make_unique<Lane>(*model_);
}

void Encoder::give_back(std::unique_ptr<Lane> lane) {
  const std::lock_guard lock(mutex_);
  lanes_.push_back(std::move(lane));
}

int64_t Encoder::num_rows(const Texts& texts, Pooling pooling) const {
  const auto number = [](int64_t n) { return std::to_string(n); };
  const auto check = [&](const char* name, int64_t place, const Ids& values, int64_t size) {
    for (const int32_t id : values)
      if (id < 0 || id >= size)
        throw std::invalid_argument(std::string(name) + ": expected numbers from 0 to " + number(size - 1) + ", got " +
                                    number(id) + " in text " + number(place));
  };
  if (texts.has_ids() && model_->source_vocab_size() == 0)
    throw std::invalid_argument("expected embeddings instead of ids: the model has no embedding table");
  if (texts.embedded && !model_->source_projection.empty())
    throw std::invalid_argument("expected ids instead of embeddings: the model projects its embeddings");
  if (!texts.types.empty() && std::ssize(texts.types) != texts.count())
    throw std::invalid_argument("token_types: expected one list for each of " + number(texts.count()) + " texts, got " +
                                number(std::ssize(texts.types)));
  check_sparse(texts, pooling);
  int64_t tokens = 0;
  for (int64_t i = 0; i < texts.count(); ++i) {
    const int64_t length = texts.length(i);
    if (length < 1 || length > model_->max_len())
      throw std::invalid_argument("ids: expected texts of 1 to " + number(model_->max_len()) + " tokens, got " +
                                  number(length) + " in text " + number(i));
    if (texts.has_ids()) check("ids", i, texts.ids[i], model_->source_vocab_size());
    if (!texts.types.empty()) {
      const auto types = std::ssize(texts.types[i]);
      if (types != length)
        throw std::invalid_argument("token_types: expected one for each of " + number(length) + " tokens, got " +
                                    number(types) + " in text " + number(i));
      check("token_types", i, texts.types[i], std::max<int64_t>(1, model_->num_token_types()));
    }
    tokens += length;
  }
  return pooling == Pooling::none ? tokens : texts.count();
}

void Encoder::check_sparse(const Texts& texts, Pooling pooling) const {
  // The tokens that attend but are attended to by none are at the beginning of a text; they may be from anywhere in it.
  const auto check = [&](const char* name, const std::vector<Ids>& lists, int64_t size, bool rises) {
    if (!lists.empty() && std::ssize(lists) != texts.count())
      throw std::invalid_argument(std::string(name) + ": expected one list for each text");
    for (size_t i = 0; i < lists.size(); ++i) {
      const Ids& list = lists[i];
      if (list.empty()) continue;
      if (std::ssize(list) != texts.length(static_cast<int64_t>(i)))
        throw std::invalid_argument(std::string(name) + ": expected one for each token, in text " + std::to_string(i));
      const int64_t first = texts.unseen.empty() ? 0 : std::max<int64_t>(0, texts.unseen[i]);
      for (int64_t t = 0; t < std::ssize(list); ++t)
        if (list[t] < 0 || list[t] >= size || (rises && t > 0 && t != first && list[t] <= list[t - 1]))
          throw std::invalid_argument(std::string(name) + ": expected " + (rises ? "ascending " : "") +
                                      "numbers from 0 to " + std::to_string(size - 1) + ", got " +
                                      std::to_string(list[t]) + " in text " + std::to_string(i));
    }
  };
  if (!texts.unseen.empty() && std::ssize(texts.unseen) != texts.count())
    throw std::invalid_argument("unseen: expected one number for each text");
  check("positions", texts.positions, model_->num_positions(), false);
  check("places", texts.places, model_->num_places(), true);
  if (texts.unseen.empty()) return;
  for (int64_t i = 0; i < texts.count(); ++i)
    if (texts.unseen[i] != 0 &&
        (texts.unseen[i] < 0 || texts.unseen[i] >= texts.length(i) || !texts.is_sparse(i) || pooling != Pooling::none))
      throw std::invalid_argument(
          "unseen: expected fewer than the tokens of the text, with places and without pooling, in text " +
          std::to_string(i));
}

void Encoder::encode(const Texts& texts, Pooling pooling, bool normalise, int threads, float* out) {
  if (threads < 1) throw std::invalid_argument("expected at least one thread");
  const int64_t dim = model_->options.d_model, count = texts.count();
  std::vector<int64_t> places(count + 1, 0);  // the first output row of each text
  std::vector<int64_t> firsts(count, 0);      // the first token of each text in the embedded rows
  int64_t tokens = 0;
  for (int64_t i = 0; i < count; ++i) {
    firsts[i] = tokens;
    tokens += texts.length(i);
    places[i + 1] = pooling == Pooling::none ? tokens : i + 1;
  }
  if (model_->encoder_bytes() * std::min<int64_t>(tokens, 16) < kWork) threads = 1;

  // The longest texts come first. The last ones are then short, and no thread waits long for them.
  const bool is_apart = threads > 1 && count > 1 && tokens >= kLeastTokens * threads;
  const int64_t most = is_apart ? std::clamp(tokens / (kTurns * threads), kLeastTokens, kMostTokens) : kMostTokens;
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return texts.length(a) > texts.length(b); });
  std::vector<int64_t> ends;  // the ends of the parts of `order` that go through the stack together
  for (int64_t i = 0, tokens = 0; i < count; ++i) {
    const int64_t length = texts.length(order[i]);
    if (i > 0 && tokens + length > most) ends.push_back(i), tokens = 0;
    tokens += length;
  }
  if (count > 0) ends.push_back(count);

  const auto run = [&](Lane& lane, size_t part, int threads) {
    const int64_t begin = part ? ends[part - 1] : 0, end = ends[part];
    Batch& batch = lane.batch;
    batch.ids.clear(), batch.positions.clear(), batch.types.clear(), batch.spans.clear(), batch.embedded.clear();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t length = texts.length(order[i]);
      const float* embedded = texts.embedded + firsts[order[i]] * dim;
      if (texts.features) {
        lane.embeddings.reserve((end - begin) * length * dim);
        embedded = lane.embeddings.data() + (i - begin) * length * dim;
        lane.forward.read_features(texts.features + order[i] * model_->num_mels() * texts.frames, texts.frames, threads,
                                   lane.embeddings.data() + (i - begin) * length * dim);
      }
      if (!texts.has_ids())
        for (int64_t t = 0; t < length; ++t) batch.embedded.push_back(embedded + t * dim);
      batch.add(texts.has_ids() ? texts.ids[order[i]].data() : nullptr, length, 0, nullptr, nullptr, false);
      if (!texts.types.empty()) {
        const Ids& types = texts.types[order[i]];
        batch.types.insert(batch.types.end(), types.begin(), types.end());
      }
      if (!texts.positions.empty() && !texts.positions[order[i]].empty())
        std::copy_n(texts.positions[order[i]].begin(), length, batch.positions.end() - length);
      if (texts.is_sparse(order[i])) batch.spans.back().places = texts.places[order[i]].data();
      batch.spans.back().unseen = texts.num_unseen(order[i]);
    }
    lane.states.reserve(batch.count() * dim);
    const int64_t tasks = std::min<int64_t>(threads, end - begin);
    lane.forward.encode(batch, threads, lane.states.data(),
                        {tasks, [&, begin, end, tasks](int64_t task) {
                           for (int64_t i = (end - begin) * task / tasks; i < (end - begin) * (task + 1) / tasks; ++i) {
                             const Span& span = lane.batch.spans[i];
                             const int64_t text = order[begin + i];
                             const float* states = lane.states.data() + span.begin * dim;
                             float* to = out + places[text] * dim;
                             if (pooling == Pooling::none) std::copy_n(states, (span.end - span.begin) * dim, to);
                             else pool(pooling, states, span.end - span.begin, dim, to);
                             if (!normalise) continue;
                             for (int64_t row = places[text]; row < places[text + 1]; ++row)
                               divide_by_length(out + row * dim, dim);
                           }
                         }});
  };
  const int64_t parts = std::ssize(ends), workers = is_apart ? std::min<int64_t>(threads, parts) : 1;
  // Of a few long parts, the last ones would keep some threads busy and the others waiting: all threads share them.
  const bool are_few = is_apart && parts <= kTurns * threads && texts.length(order[count - 1]) > kMostTokens;
  const int64_t shared = are_few ? parts % workers : 0;
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t) {
    std::unique_ptr<Lane> lane = take();
    for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts - shared;) run(*lane, part, 1);
    give_back(std::move(lane));
  };
  const bool is_begun = workers > 1 && run_workers({workers, work});
  std::unique_ptr<Lane> lane = take();
  for (int64_t part = is_begun ? parts - shared : 0; part < parts; ++part) run(*lane, part, threads);
  give_back(std::move(lane));
}

}  // namespace fastformer
