// For ThreadSanitizer (`make sanitize`): callers who run stages at once, and sessions of one model on several threads,
// each of which takes helpers where it gets them, for few rows and for so many that they are split among the threads: a
// decoder alone in fp32 and bf16, with keys and values in int8 too, and one with an encoder in int8. So do callers of
// one encoder, with ids or states, and of a small Whisper. Exits with 1 where a number isn't the one that one thread
// finds.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/decoder.h"
#include "engine/encoder.h"
#include "engine/token_rules.h"

using namespace fastformer;

namespace {

constexpr int64_t kDim = 256, kInner = 1024, kVocab = 1000, kMaxLen = 64;
// Of a Whisper: so many frames that threads share a recording where there is one for each, and one more.
constexpr int64_t kMels = 8, kFrames = 540, kTokens = kFrames / 2;

std::unique_ptr<Search> three_beams(int64_t limit) {
  return make_beam_search(limit, {1}, 3, 0.6, 1, EarlyStopping::kNo, limit % 2 == 0);
}

// Each stage adds up what the one before it has written.
uint64_t add_up(int threads, int rounds) {
  constexpr int64_t kStages = 6, kTasks = 7;
  std::vector<std::vector<uint64_t>> written(kStages, std::vector<uint64_t>(kTasks));
  std::vector<Stage> stages;
  for (int64_t i = 0; i < kStages; ++i)
    stages.push_back({i % 3 ? kTasks : 1, [&written, i](int64_t task) {
                        uint64_t sum = 0;
                        for (const uint64_t number : written[(i + kStages - 1) % kStages]) sum = sum * 31 + number;
                        written[i][task] = written[i][task] * 7 + sum + static_cast<uint64_t>(task) + 1;
                      }});
  for (int round = 0; round < rounds; ++round) run_stages(stages, threads);
  return written.back().back();
}

// Calls that share out tasks among themselves; returns how many were done, each of them once.
int64_t done_together(int threads, int rounds) {
  constexpr int64_t kTasks = 50;
  int64_t done = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<int64_t> counts(kTasks);
    std::atomic<int64_t> taken{0};
    const auto work = [&] {
      for (int64_t i = taken++; i < kTasks; i = taken++) ++counts[i];
    };
    if (!run_together(threads, work)) work();
    for (const int64_t count : counts) done += count == 1;
  }
  return done;
}

// It keeps no tensor: each is copied as it is packed.
// is_speech: the encoder reads features, and the decoder states.
std::shared_ptr<const PackedModel> make_model(Precision precision, bool has_encoder, bool has_decoder = true,
                                              bool is_speech = false) {
  std::map<std::string, std::vector<float>> memory;
  ModelTensors tensors;
  std::mt19937 generator(1);
  std::normal_distribution<float> draw(0.f, 0.06f);
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    std::vector<float>& values = memory[name];
    values.resize(shape[0] * shape[1]);
    for (float& value : values) value = draw(generator);
    tensors[name] = {values.data(), Kind::fp32, shape};
  };
  const auto add_attention = [&](const std::string& name) {
    add(name + ".in_proj_weight", {3 * kDim, kDim}), add(name + ".out_proj.weight", {kDim, kDim});
  };
  const auto add_layer = [&](const std::string& name) {
    add_attention(name + ".self_attn");
    add(name + ".linear1.weight", {kInner, kDim}), add(name + ".linear2.weight", {kDim, kInner});
  };
  if (has_decoder) {
    add("target_embedding", {kVocab, kDim}), add("output", {kVocab, kDim}), add("target_positions", {kMaxLen, kDim});
    add_layer("decoder.layers.0");
  }
  if (has_encoder && is_speech && !has_decoder) {
    add("front.0.weight", {kDim, 3 * kMels}), add("front.1.weight", {kDim, 3 * kDim});
    add("front.positions", {kTokens, kDim});
  } else if (has_encoder && !is_speech) {
    add("source_embedding", {kVocab, kDim}), add("source_positions", {kMaxLen, kDim});
  }
  const bool has_layers = has_encoder && !(is_speech && has_decoder);
  if (has_layers) add_layer("encoder.layers.0");
  if (has_encoder) add_attention("decoder.layers.0.multihead_attn");
  const ModelOptions options{.precision = precision,
                             .d_model = kDim,
                             .num_heads = 4,
                             .num_kv_heads = 4,
                             .head_dim = kDim / 4,
                             .num_encoder_layers = has_encoder ? has_layers : -1,
                             .num_decoder_layers = has_decoder ? 1 : 0,
                             .norm_placement = NormPlacement::pre,
                             .is_bare = is_speech,
                             .eps = 1e-5f,
                             .attention_scale = 0.25f,
                             .encoder_windows = std::vector<int64_t>(has_layers ? 1 : 0, -1),
                             .decoder_windows = std::vector<int64_t>(has_decoder ? 1 : 0, -1),
                             .max_len = is_speech ? kTokens : 0,
                             .activation = Activation::relu};
  return std::make_shared<PackedModel>(options, tensors);
}

void note(const Search& search, std::vector<float>& said) {
  for (const Hypothesis& one : search.results()) said.insert(said.end(), one.log_probs.begin(), one.log_probs.end());
}

// Runs, one after the other, until all searches are done, and their groups gone; false where memory doesn't do. A run
// may end early for many reasons, and one of them, that a lane is through with its rows, is a matter of timing.
bool finish(Session& session, std::vector<Search*> going, Ids tokens, const RunLimits& limits, int threads) {
  while (!going.empty()) {
    session.run(going, tokens, limits, true, threads);
    std::vector<Search*> left;
    std::vector<int64_t> gone;
    tokens.clear();
    for (size_t i = 0; i < going.size(); ++i) {
      if (going[i]->is_done) {
        gone.push_back(static_cast<int64_t>(i));
        continue;
      }
      left.push_back(going[i]);
      const size_t before = tokens.size();
      tokens.resize(before + going[i]->num_rows);
      going[i]->last_tokens(tokens.data() + before);
    }
    session.release(gone);
    going.swap(left);
    if (!going.empty() && session.step_tokens() > session.free_tokens()) return false;
  }
  return true;
}

std::vector<Source> sources_of(const std::vector<Ids>& lists) {
  std::vector<Source> sources;
  for (const Ids& ids : lists) sources.push_back({ids.data(), nullptr, std::ssize(ids)});
  return sources;
}

// Prompts, steps, forks, whole searches and a shortlist; what all of it said.
std::vector<float> decode(const std::shared_ptr<const PackedModel>& model, std::optional<CacheType> type, int32_t seed,
                          int threads) {
  Session session(model, 2048, type);
  std::vector<float> said, logits(2 * kVocab);
  std::vector<Ids> sources;
  if (model->options.has_encoder()) sources = {{4, 3, seed}, {5}, {6, 7, 8, 9, 10, 11}};
  session.admit(sources_of(sources), {{seed, 5, 6}, {7, 8, 9, 10}, {11}}, threads);
  Ids tokens{12, 13, 14};
  const Selection selection{2, true, {0, 2}, logits.data(), {}, {{13, 0, 2}, {seed, 1, 3}}};
  for (int step = 0; step < 12; ++step) {
    const Candidates& candidates = session.step(tokens, {}, selection, threads);
    said.insert(said.end(), candidates.values.begin(), candidates.values.end());
    said.push_back(logits[step]), said.push_back(logits[kVocab + step]);
    tokens.clear();
    for (size_t row = 0; row < candidates.ids.size(); row += 2) tokens.push_back(candidates.ids[row]);
    if (step != 5) continue;
    session.reorder({{0, 0, 0}, {0, 0}, {0}});
    tokens = {15, 16, 17, 18, 19, 20};
  }
  session.release({1});
  session.reorder({{2}, {0}});
  const std::unique_ptr<Search> greedy = make_greedy_search(9, {1}), beams = three_beams(9);
  if (!finish(session, {greedy.get(), beams.get()}, {21, 22}, {20, 10.0, 0}, threads)) return {};
  note(*greedy, said), note(*beams, said);
  session.set_shortlist({1, seed, 40, 41, 42, 43, 44, 999});
  session.admit(sources_of(sources), {{seed}, {7, 8}, {11}}, threads);
  const std::unique_ptr<Search> few = three_beams(5), one = make_greedy_search(6, {1}), other = three_beams(7);
  if (!finish(session, {few.get(), one.get(), other.get()}, {40, 41, 42}, {20, 10.0, 0}, threads)) return {};
  for (const Search* search : {few.get(), one.get(), other.get()}) note(*search, said);
  return said;
}

// Prompts that begin alike, together and later, in memory that does not hold all of them; what all of it said.
std::vector<float> share(const std::shared_ptr<const PackedModel>& model, int32_t seed, int threads) {
  Session session(model, model->options.has_encoder() ? 224 : 96);
  std::vector<float> said;
  for (int32_t turn = 0; turn < 6; ++turn) {
    std::vector<Ids> sources, prompts;
    for (int32_t i = 0; i < 3; ++i) {
      prompts.push_back(Ids(16 + 16 * (turn % 2), seed));
      prompts.back().resize(34 + i, turn + 10);
      if (model->options.has_encoder()) sources.push_back({4, 5, i});
    }
    session.admit(sources_of(sources), prompts, threads);
    const Candidates& candidates = session.step({7, 8, 9}, {1, 1, 1}, {2, true}, threads);
    said.insert(said.end(), candidates.values.begin(), candidates.values.end());
    session.release({0, 1, 2});
  }
  return said;
}

// Searches of many rows in little memory, which those of some lanes run out of first.
std::vector<float> decode_many(const std::shared_ptr<const PackedModel>& model, int threads) {
  constexpr int64_t kGroups = 60;
  Session session(model, 3200);
  std::vector<Ids> sources, prompts;
  std::vector<std::unique_ptr<Search>> searches;
  Ids tokens;
  for (int32_t i = 0; i < kGroups; ++i) {
    prompts.push_back({i, 5});
    if (model->options.has_encoder()) sources.push_back(Ids(1 + i % 19, i + 3));
    tokens.push_back(i + 1);
    searches.push_back(i % 3 ? make_greedy_search(2 + i % 9, {1}) : three_beams(2 + i % 9));
  }
  session.admit(sources_of(sources), prompts, threads);
  std::vector<Search*> going;
  for (const auto& search : searches) going.push_back(search.get());
  // Some runs end by time. The others last until lanes have taken blocks side by side, on a busy machine too.
  const double seconds = threads == 2 ? 10.0 : 0.005;
  if (!finish(session, going, tokens, {1000, seconds, 20}, threads)) return {};
  std::vector<float> said;
  for (const auto& search : searches) note(*search, said);
  return said;
}

// Few texts and many, pooled and not; texts with gaps between their tokens; and states instead of ids.
std::vector<float> encode(Encoder& encoder, int threads) {
  std::vector<float> said;
  const auto note = [&](const Texts& texts, Pooling pooling, bool normalise) {
    std::vector<float> rows(encoder.num_rows(texts, pooling) * kDim);
    encoder.encode(texts, pooling, normalise, threads, rows.data());
    said.insert(said.end(), rows.begin(), rows.end());
  };
  for (const int32_t count : {1, 3, 40})
    for (const Pooling pooling : {Pooling::mean, Pooling::max, Pooling::none}) {
      Texts texts;
      for (int32_t i = 0; i < count; ++i) texts.ids.push_back(Ids(1 + i * 7 % kMaxLen, i + 3));
      note(texts, pooling, count > 1);
    }
  Texts sparse, states;
  std::vector<float> rows;
  for (int32_t i = 0; i < 20; ++i) {
    const int32_t length = 2 + i * 7 % 30;
    sparse.ids.push_back(Ids(length, i + 3));
    sparse.places.emplace_back();
    for (int32_t t = 0; t < length; ++t) sparse.places.back().push_back(t * 2 + (t > 3));
    sparse.unseen.push_back(i % 2);
    states.lengths.push_back(length);
    for (int64_t c = 0; c < length * kDim; ++c) rows.push_back(static_cast<float>((c * 7 + i) % 11) / 11.f);
  }
  states.embedded = rows.data();
  note(sparse, Pooling::none, false), note(states, Pooling::none, false);
  return said;
}

// Recordings, their states, and the texts of all of them together: with rules and without, greedy and with beams.
struct Speech {
  Encoder encoder{make_model(Precision::int8, true, false, true)};
  std::shared_ptr<const PackedModel> decoder = make_model(Precision::int8, true, true, true);
};

std::vector<float> transcribe(Speech& speech, int threads) {
  constexpr int64_t kWindows = 3;
  std::vector<float> features(kWindows * kMels * kFrames), said(kWindows * kTokens * kDim);
  for (size_t i = 0; i < features.size(); ++i) features[i] = static_cast<float>(i * 7 % 23) / 23.f;
  Texts windows;
  windows.features = features.data(), windows.frames = kFrames, windows.lengths.assign(kWindows, kTokens);
  speech.encoder.encode(windows, Pooling::none, false, threads, said.data());
  std::vector<Source> sources;
  for (int64_t i = 0; i < kWindows; ++i) sources.push_back({nullptr, said.data() + i * kTokens * kDim, kTokens});
  Session session(speech.decoder, 1024);
  session.admit(sources, {{}, {5, 6}, {7}}, threads);
  const std::unique_ptr<Search> greedy = make_greedy_search(7, {1}), ruled = make_greedy_search(9, {1}),
                                beams = three_beams(8);
  ruled->rules = std::make_shared<const TokenRules>(
      TokenRules{.suppressed = {8, 9}, .timestamp_begin = 900, .max_initial_timestamp = 950, .end_of_text = 1});
  if (!finish(session, {greedy.get(), ruled.get(), beams.get()}, {3, 4, 5}, {20, 10.0, 0}, threads)) return {};
  for (const Search* search : {greedy.get(), ruled.get(), beams.get()}) note(*search, said);
  return said;
}

}  // namespace

int main() {
  std::atomic<int> wrong{0};
  const uint64_t sum = add_up(1, 300);
  struct Case {
    std::shared_ptr<const PackedModel> model;
    std::optional<CacheType> type;
    std::vector<float> first, second, many, shared;  // what one thread finds
  };
  std::vector<Case> cases;
  using Kind = std::tuple<Precision, bool, std::optional<CacheType>>;
  for (const auto& [precision, has_encoder, type] :
       {Kind(Precision::fp32, false, {}), Kind(Precision::bf16, false, {}),
        Kind(Precision::bf16, false, CacheType::int8), Kind(Precision::int8, true, {})}) {
    const auto model = make_model(precision, has_encoder);
    cases.push_back(
        {model, type, decode(model, type, 3, 1), decode(model, type, 4, 1), decode_many(model, 1), share(model, 3, 1)});
    if (cases.back().first == cases.back().second || cases.back().first.empty() || cases.back().many.empty()) ++wrong;
    // While no other caller takes the helpers, which let one caller deal rows to them at a time.
    wrong += decode(model, type, 3, 2) != cases.back().first, wrong += decode_many(model, 2) != cases.back().many;
    wrong += share(model, 3, 2) != cases.back().shared;
  }
  Encoder encoder(make_model(Precision::bf16, true, false));
  const std::vector<float> encoded = encode(encoder, 1);
  wrong += encode(encoder, 2) != encoded;
  Speech speech;
  const std::vector<float> transcribed = transcribe(speech, 1);
  wrong += transcribed.empty(), wrong += transcribe(speech, 2) != transcribed;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 5; ++caller)
    callers.emplace_back([&, caller] {
      for (int turn = 0; turn < 6; ++turn) {
        const Case& one = cases[turn % cases.size()];
        if (caller < 2) wrong += add_up(2 + turn % 3, 300) != sum, wrong += done_together(2 + turn % 3, 300) != 15000;
        else if (caller < 4)
          wrong += decode(one.model, one.type, caller + 1, 1 + turn) != (caller == 2 ? one.first : one.second);
        else wrong += decode_many(one.model, 2 + turn % 2) != one.many, wrong += share(one.model, 3, 2) != one.shared;
        if (caller > 2 && turn < 2) wrong += transcribe(speech, 2) != transcribed;
        if (caller != 2) wrong += encode(encoder, 1 + (caller + turn) % 3) != encoded;
      }
    });
  for (std::thread& caller : callers) caller.join();
  std::printf("%d wrong\n", wrong.load());
  return wrong != 0;
}
